# MeshRec with its kernels, the command line, training and the server.
#
#   docker build -t meshrec:1 .                                       torch as pip finds it
#   docker build -t meshrec:1 --build-arg TORCH_INDEX=URL .           torch of another index: for CPUs only, or a CUDA
#   docker run --rm --shm-size 2g -v "$PWD/runs:/runs" meshrec:1 train movielens_dlrm --out /runs
#
# torch's installation page names the index for CPUs and for each CUDA. The wheel is the same for all of them.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
ARG TORCH_INDEX=""
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt ./
RUN python -m venv /venv \
    && /venv/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep ^torch== constraints.txt)"
# hadolint ignore=DL3013
RUN /venv/bin/pip install --no-cache-dir "setuptools>=78.1.1" wheel
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY csrc csrc
COPY src src
RUN /venv/bin/pip wheel --no-cache-dir --no-build-isolation --no-deps -w /wheel . \
    && wheel=$(ls /wheel/*.whl) \
    && /venv/bin/pip install --no-cache-dir -c constraints.txt "${wheel}[cli,data,metrics,movielens,serve,train]" \
    && /venv/bin/pip uninstall --yes setuptools wheel

FROM python:${PYTHON}-slim
# torch's threads; everything else is in the environment.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home meshrec \
    && mkdir /runs /models \
    && chown meshrec /runs
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1
USER 1000
WORKDIR /home/meshrec
VOLUME ["/runs"]
EXPOSE 8080 29500
ENTRYPOINT ["meshrec"]
CMD ["--help"]
