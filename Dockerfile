# An image with the commands, for NVIDIA GPUs or without one. Build it in a clone:
#
#   docker build -t roundpipe-lightning .
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 --user "$(id -u):$(id -g)" \
#       -v "$PWD:/work" -v "$HOME/.cache/huggingface:/tmp/.cache/huggingface" roundpipe-lightning \
#       roundpipe-train recipe=qwen3_0_6b/lora data=my.jsonl
#
# Page-locked memory needs --ulimit memlock=-1. The second -v keeps what the hub sends. For the CPU
# build of torch:
#   --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
FROM python:3.12-slim

# transformers and hydra write to the home folder, so that any user may run the image
ENV HOME=/tmp PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

ARG TORCH_INDEX=https://pypi.org/simple
WORKDIR /opt/roundpipe_lightning
COPY constraints.txt ./
RUN pip install -c constraints.txt --index-url "$TORCH_INDEX" \
    --extra-index-url https://pypi.org/simple torch==2.13.0

COPY pyproject.toml README.md LICENSE roundpipe_commands.py ./
COPY conf ./conf
COPY roundpipe_lightning ./roundpipe_lightning
RUN pip install -c constraints.txt ".[quant]"

WORKDIR /work
CMD ["roundpipe-train", "--help"]
