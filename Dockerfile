# The training image. NVIDIA's base brings PyTorch, CUDA, NCCL and apex (FusedLAMB):
#   docker build -t tempo-bert .
#   docker run --gpus all --ipc=host --rm -it -v /path/to/data:/data -v /path/to/runs:/runs tempo-bert
# --ipc=host gives the data-loading workers shared memory; Docker's default of 64 MB is too small for them.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.03-py3
FROM ${BASE_IMAGE}

WORKDIR /workspace/tempo-bert

# Requirements first: this layer is rebuilt only when they change. The base image constrains what it ships itself
# (PyTorch, NumPy, ...), so the names are installed under its constraints here instead of from the lock file.
COPY requirements.in ./
RUN pip install --no-cache-dir --requirement requirements.in

COPY . .
# In place, since training runs from here: the compiled layers lie beside their Python.
RUN pip install --no-cache-dir --no-build-isolation --no-deps --editable . \
    && useradd --create-home --user-group trainer \
    && mkdir -p /data /runs \
    && chown trainer:trainer /data /runs

USER trainer
HEALTHCHECK CMD ["python", "-c", "import torch, tempo; assert torch.cuda.is_available()"]
CMD ["bash"]
