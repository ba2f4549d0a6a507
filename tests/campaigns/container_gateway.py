"""Test the gateway of the compose files: `python -m tests.campaigns.container_gateway`.

It needs Docker with compose v2, and curl.

The containers run once plain, and once with docker-compose.tls.yml, certificates and tokens. Each time
`docker compose up --wait` must return with every service healthy, and curl must get the completion that a client of the
draft service gets. With tokens, a request without an API key must be refused. The campaign prints the answers, and
removes the containers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dynatree.client import Client
from tests.support.certificates import Authority
from tests.support.paths import ROOT

PORT, HTTP_PORT = 50161, 8161
DRAFT_TOKEN, TOKEN = "0123456789abcdef-draft", "0123456789abcdef-team-a"
BODY = {"prompt": "It was a bright cold morning", "max_tokens": 24, "temperature": 0}
PLAIN = ("docker-compose.yml",)
TLS = ("docker-compose.yml", "docker-compose.tls.yml")


def compose(files: Sequence[str], secrets: Path, *arguments: str) -> str:
    """Run a compose command and return its output."""
    named = [word for file in files for word in ("--file", file)]
    command = ["docker", "compose", "--project-name", "dynatree-gateway", *named, *arguments]
    environment = os.environ | {
        "DYNATREE_GRPC_PORT": str(PORT),
        "DYNATREE_HTTP_PORT": str(HTTP_PORT),
        "SECRETS": str(secrets),
    }
    run = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return run.stdout


def curl(path: str, *options: str, body: object = None) -> tuple[int, str]:
    """Make a request; return the status and the body of the answer."""
    command = ["curl", "--silent", "--show-error", "--noproxy", "*", "--write-out", "\n%{http_code}", *options, path]
    if body is not None:
        command += ["--header", "Content-Type: application/json", "--data", json.dumps(body)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    answer, _, status = run.stdout.rpartition("\n")
    print(status, path, answer if len(answer) < 1000 else f"({len(answer)} characters)", flush=True)
    return int(status), answer


def make_secrets(folder: Path) -> None:
    """Write the files that docker-compose.tls.yml names."""
    folder.chmod(0o755)  # the services run as another user
    authority = Authority(folder)
    for name in ("verify", "draft", "gateway"):
        (folder / name).mkdir()
        shutil.copy(folder / "authority.pem", folder / name)
        pair = authority.pair(name)
        pair.certificate.rename(folder / name / "tls.pem")
        pair.key.rename(folder / name / "tls.key")
    (folder / "verify" / "tokens").write_text(f"draft:{DRAFT_TOKEN}\n")
    (folder / "draft" / "verify-token").write_text(DRAFT_TOKEN)
    (folder / "draft" / "tokens").write_text(f"team-a:{TOKEN}\n")


def failures(url: str, client: Client, options: Sequence[str], key: Sequence[str]) -> list[str]:
    """Descriptions of the wrong answers of the gateway at `url`.

    Args:
        url: URL without a path.
        client: Client of the draft service behind the gateway.
        options: Connection options for curl.
        key: Options for curl with the API key; empty if the services require none.
    """
    failed = []
    for path in ("/health", "/metrics", "/"):  # these need no key
        if curl(f"{url}{path}", *options)[0] != 200:
            failed.append(f"{url}{path} was not answered")
    if key and curl(f"{url}/v1/completions", *options, body=BODY)[0] != 401:
        failed.append("a request without a key was not refused")
    status, answer = curl(f"{url}/v1/completions", *options, *key, body=BODY)
    expected = client.generate(BODY["prompt"], max_new_tokens=BODY["max_tokens"], temperature=0).text
    if status != 200 or json.loads(answer)["choices"][0]["text"] != expected:
        failed.append(f"{status} {answer}, and not {expected!r}")
    return failed


def main() -> int:
    """Run the campaign and return the exit status."""
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        secrets = Path(name)
        make_secrets(secrets)
        ca = secrets / "authority.pem"
        try:
            compose(PLAIN, secrets, "up", "--wait", "--build")
            print(compose(PLAIN, secrets, "ps", "--format", "{{.Service}}: {{.Status}}"), end="", flush=True)
            with Client(f"localhost:{PORT}") as client:
                failed += failures(f"http://localhost:{HTTP_PORT}", client, (), ())
            compose(TLS, secrets, "up", "--wait")
            print(compose(TLS, secrets, "ps", "--format", "{{.Service}}: {{.Status}}"), end="", flush=True)
            with Client(f"localhost:{PORT}", ca=ca, token=TOKEN) as client:
                key = ("--header", f"Authorization: Bearer {TOKEN}")
                failed += failures(f"https://localhost:{HTTP_PORT}", client, ("--cacert", str(ca)), key)
        finally:
            compose(TLS, secrets, "down", "--volumes")
    for error in failed:
        print(error)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
