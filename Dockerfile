# An image of megajax for one process per GPU or per host; the clone is the build context.
#
#   docker build --tag megajax:cuda .                              # NVIDIA GPUs, CUDA 12
#   docker build --tag megajax:cuda13 --build-arg EXTRAS=cuda13 .  # NVIDIA GPUs, CUDA 13
#   docker build --tag megajax:cpu --build-arg EXTRAS=chat .       # simulated devices
#   docker run --gpus all --shm-size=16g --volume "$PWD/runs:/runs" megajax:cuda train tiny run.dir=/runs/tiny
#
# CUDA comes with jax's own packages: the host needs the driver and its container toolkit alone.
FROM python:3.12-slim

ARG EXTRAS=cuda
COPY . /opt/megajax
RUN pip install --no-cache-dir "/opt/megajax[$EXTRAS]"
WORKDIR /runs
ENTRYPOINT ["megajax"]
