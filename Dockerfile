# Trains the demo on an NVIDIA GPU, or slowly without one; runs/ stays on the host:
#     docker build --tag overcoat .
#     mkdir -p runs && docker run --rm --gpus all --user "$(id -u)" --volume "$PWD/runs:/app/runs" overcoat
# Another command goes behind: ... overcoat overcoat doctor
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

# Triton compiles its launchers with a C compiler and Python's headers. PyTorch brings the rest of CUDA.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

# Any user may write here: Triton's cache, and what a run leaves.
ENV HOME=/app PATH=/opt/overcoat/bin:$PATH
WORKDIR /app
RUN chmod 1777 /app

COPY pyproject.toml setup.py README.md LICENSE MANIFEST.in /opt/source/
COPY overcoat /opt/source/overcoat
RUN python3.12 -m venv /opt/overcoat \
    && /opt/overcoat/bin/pip install --no-cache-dir torch==2.13.0 '/opt/source[hf]' \
    && rm -rf /opt/source
COPY configs /app/configs

USER 1000
CMD ["overcoat", "train", "configs/demo.toml"]
