# Three images: `docker build --target verify .`, `--target draft` and `--target gateway`. The first two are one
# installation; the gateway has no torch. All run `dynatree`; arguments after the image's name replace the command.
# A digest pins the base: `--build-arg BASE_IMAGE=python:3.11-slim-bookworm@sha256:...`.
ARG BASE_IMAGE=python:3.11-slim-bookworm

# A C compiler makes the kernels; where none can be had, torch's are used.
FROM ${BASE_IMAGE} AS wheel
ARG PIP_ARGS=""
RUN command -v cc \
 || { apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev >/dev/null; } \
 || echo "no C compiler: there will be no kernels of our own"
RUN python3 -m venv /opt/build
WORKDIR /src
# What is fetched has the hashes that PyPI serves (`make hashes`), but for torch: PIP_ARGS says which build of it.
COPY deploy/hashes/build.txt deploy/hashes/
RUN /opt/build/bin/pip install --no-cache-dir --disable-pip-version-check ${PIP_ARGS} \
      --require-hashes -r deploy/hashes/build.txt
COPY . .
RUN /opt/build/bin/pip wheel --no-cache-dir --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir /built .

FROM ${BASE_IMAGE} AS python
LABEL org.opencontainers.image.title="DynaTree" \
      org.opencontainers.image.description="Lossless tree speculative decoding for Hugging Face models" \
      org.opencontainers.image.version="0.2.0" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/dynatree/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
RUN useradd --system --create-home --uid 10001 dynatree \
 && python3 -m venv /opt/dynatree
ENTRYPOINT ["dynatree"]

FROM python AS gateway
ARG PIP_ARGS=""
RUN --mount=from=wheel,source=/built,target=/built --mount=source=deploy/hashes,target=/tmp/hashes \
    pip install --no-cache-dir --disable-pip-version-check ${PIP_ARGS} --require-hashes -r /tmp/hashes/gateway.txt \
 && pip install --no-cache-dir --disable-pip-version-check --no-index --no-deps /built/*.whl \
 && python -m compileall -q /opt/dynatree/lib/python3*/site-packages/dynatree \
 && python -c 'import dynatree.gateway.serve_gateway'

USER 10001
WORKDIR /home/dynatree
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=10s --start-period=10m --retries=3 \
  CMD ["python", "-m", "dynatree.serving.healthcheck", "http://127.0.0.1:8000"]
CMD ["gateway", "--server", "dns:///draft:50051", "--listen", "0.0.0.0:8000", "--insecure"]

FROM python AS serve
# More arguments for pip; which index it is given decides between the CPU and the CUDA builds of torch.
ARG PIP_ARGS=""
# Ours, with offloaded layers and the measured number of rows, is the folder dynatree of XDG_CACHE_HOME.
ENV HF_HOME=/var/cache/huggingface \
    XDG_CACHE_HOME=/var/cache \
    TRITON_CACHE_DIR=/var/cache/dynatree/triton
RUN install --directory --owner dynatree --group dynatree "$HF_HOME" "$XDG_CACHE_HOME/dynatree" "$TRITON_CACHE_DIR"

# The dependencies come first, so that a change of the code does not fetch torch again.
WORKDIR /src
COPY pyproject.toml constraints.txt deploy/hashes/serve.txt ./
RUN pip install --no-cache-dir --disable-pip-version-check ${PIP_ARGS} --require-hashes -r serve.txt
RUN python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(*p["dependencies"], *p["optional-dependencies"]["serve"], sep="\n")' > /tmp/requirements.txt \
 && pip install --no-cache-dir --disable-pip-version-check ${PIP_ARGS} -c constraints.txt -r /tmp/requirements.txt \
 && rm /tmp/requirements.txt
# Triton, which torch's CUDA builds bring, compiles the launcher of its kernels at run time, with gcc and Python's
# headers. Its presence decides, so that no build argument can contradict the torch that PIP_ARGS chose: torch's CPU
# builds bring none, and their images get no compiler. An image that could not compile is not built.
RUN if python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("triton") is None)'; then \
      command -v gcc \
      || { apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev >/dev/null \
           && rm -rf /var/lib/apt/lists/*; } \
      && echo '#include <Python.h>' \
       | gcc -fsyntax-only -I "$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')" -xc -; \
    fi
COPY --from=wheel /built /built
RUN pip install --no-cache-dir --disable-pip-version-check --no-index --no-deps /built/*.whl \
 && python -m compileall -q /opt/dynatree/lib/python3*/site-packages/dynatree \
 && dynatree --version

USER 10001
WORKDIR /home/dynatree

FROM serve AS verify
EXPOSE 50052
HEALTHCHECK --interval=10s --timeout=10s --start-period=10m --retries=3 \
  CMD ["python", "-m", "dynatree.serving.healthcheck", "127.0.0.1:50052"]
CMD ["verify", "--target-model", "embedded", "--listen", "0.0.0.0:50052", "--insecure"]

FROM serve AS draft
EXPOSE 50051
HEALTHCHECK --interval=10s --timeout=10s --start-period=10m --retries=3 \
  CMD ["python", "-m", "dynatree.serving.healthcheck", "127.0.0.1:50051"]
CMD ["draft", "--draft-model", "embedded", "--verify", "dns:///verify:50052", "--listen", "0.0.0.0:50051", "--insecure"]
