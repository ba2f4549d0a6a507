"""Every policy on one prompt, through DynaTree's client: `python examples/policies.py [ADDRESS]`.

All texts are equal, because no tree changes what the target generates. The speeds differ. One prompt shows the idea;
`dynatree bench compare` measures. The bundled pair will do:

    dynatree serve --target-model embedded --draft-model embedded --grpc localhost:50051
"""

import sys

from dynatree.client import Client

PROMPT = "It was a bright morning in the village, and"

with Client(sys.argv[1] if sys.argv[1:] else "localhost:50051") as client:
    info = client.model_info()
    plain = client.generate(PROMPT, max_new_tokens=64, policy="autoregressive")  # the target alone, a token a round
    print(f"{info.target.name} with {info.draft.name}: {plain.text!r}\n")
    print(f"{'policy':<18}{'tokens/s':>10}{'tokens/round':>14}{'nodes/round':>13}  same text")
    for policy in info.policies:
        completion = client.generate(PROMPT, max_new_tokens=64, policy=policy)
        stats = completion.stats
        speed = stats.generated_tokens / stats.total_seconds
        same = completion.token_ids == plain.token_ids
        print(
            f"{policy:<18}{speed:>10.1f}{stats.tokens_per_round:>14.2f}{stats.nodes_per_round:>13.1f}"
            f"  {'yes' if same else 'NO'}"
        )
