"""The gateway: a draft service over HTTP, as OpenAI's clients speak it; needs the extra `gateway`.

It talks to the draft service through `dynatree.client` alone, so it runs anywhere, and any number of them may run.
"""
