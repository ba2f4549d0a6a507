"""The gateway: serves a draft service through OpenAI's HTTP API; needs the extra `gateway`.

It reaches the draft service only through `dynatree.client`, so it runs on any machine, in any number of processes.
"""
