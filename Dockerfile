# vLLM's own image with Quarry's wheel and the few packages it lacks. See deploy/README.md.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${VLLM_IMAGE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY requirements/ requirements/
COPY schemas/ schemas/
COPY connector/ connector/
COPY service/ service/
RUN uv build --wheel --out-dir /wheel \
    --build-constraints requirements/cpu.txt --build-constraints requirements/dev.txt

FROM ${VLLM_IMAGE}
COPY requirements/cuda.txt /tmp/cuda.txt
COPY --from=wheel /wheel/ /tmp/wheel/
# The second install has no index: it fails, by name, where the base image lacks or outdates something we need.
RUN uv pip install --system --no-cache --no-deps --requirement /tmp/cuda.txt \
    && uv pip install --system --no-cache --no-index "$(ls /tmp/wheel/*.whl)[service]" \
    && rm -r /tmp/cuda.txt /tmp/wheel \
    && install -d -o 2000 -g 0 -m 0775 /var/lib/quarry /var/cache/quarry

# The base image is prepared for this user. Whatever caches or compiles writes below one folder, which is a volume:
# the home too, for what asks nothing else. The engine is never forked (see service/capture/vllm_engine.py).
USER 2000:0
ENV HOME=/var/cache/quarry \
    XDG_CACHE_HOME=/var/cache/quarry \
    XDG_CONFIG_HOME=/var/cache/quarry/config \
    HF_HOME=/var/cache/quarry/huggingface \
    VLLM_CACHE_ROOT=/var/cache/quarry/vllm \
    VLLM_CONFIG_ROOT=/var/cache/quarry/vllm/config \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/quarry/inductor \
    TRITON_CACHE_DIR=/var/cache/quarry/triton \
    TILELANG_CACHE_DIR=/var/cache/quarry/tilelang \
    TVM_FFI_CACHE_DIR=/var/cache/quarry/tvm-ffi \
    FLASHINFER_WORKSPACE_BASE=/var/cache/quarry \
    CUDA_CACHE_PATH=/var/cache/quarry/cuda \
    VLLM_WORKER_MULTIPROC_METHOD=spawn \
    VLLM_NO_USAGE_STATS=1 \
    QUARRY_DATA_DIR=/var/lib/quarry \
    QUARRY_HOST=0.0.0.0 \
    QUARRY_PORT=8642
WORKDIR /var/lib/quarry
EXPOSE 8642
HEALTHCHECK --interval=30s --timeout=10s --start-period=5m --retries=3 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8642/healthz', timeout=5)"]
ENTRYPOINT ["quarry"]
CMD ["serve"]
