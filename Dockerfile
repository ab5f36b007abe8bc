# An image of megajax for one process per GPU or per host; the clone is the build context.
#
#   docker build --tag megajax:cuda .                              # NVIDIA GPUs, CUDA 12
#   docker build --tag megajax:cuda13 --build-arg EXTRAS=cuda13 .  # NVIDIA GPUs, CUDA 13
#   docker build --tag megajax:cpu --build-arg EXTRAS=chat .       # simulated devices
#   mkdir -p runs    # otherwise Docker makes it, as root
#   docker run --gpus all --shm-size=16g --ulimit memlock=-1 --user "$(id -u):$(id -g)" --volume "$PWD/runs:/runs" megajax:cuda train tiny run.dir=/runs/tiny
#
# scripts/constraints.txt has the versions of all packages, so that two builds have the same.
# CUDA comes with jax's own packages: the host needs the driver and its container toolkit alone.
# BASE may be a mirror's image, or any other with a Python of at least 3.11 and its pip.
ARG BASE=python:3.12.12-slim-bookworm
FROM $BASE

ARG EXTRAS=cuda
WORKDIR /opt/megajax
# The dependencies have their own layer, so a change of the source does not reinstall them.
COPY pyproject.toml scripts/constraints.txt ./
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
parts = [project['optional-dependencies'][extra] for extra in '$EXTRAS'.split(',')]; \
print(*project['dependencies'], *(line for part in parts for line in part \
if not line.startswith('megajax')), sep='\n')" > /tmp/requirements.txt \
    && pip install --no-cache-dir --root-user-action=ignore --requirement /tmp/requirements.txt \
    --constraint constraints.txt
# The source stays: `pip install 'megajax[EXTRA] @ file:///opt/megajax'` adds an extra later.
COPY . .
RUN pip install --no-cache-dir --root-user-action=ignore --constraint scripts/constraints.txt ".[$EXTRAS]"

# Any user may write to /runs and to HOME, as `--user` may name one that the image does not know.
RUN mkdir /runs && chmod 1777 /runs
ENV HOME=/tmp
WORKDIR /runs
USER 1000:1000
ENTRYPOINT ["megajax"]
