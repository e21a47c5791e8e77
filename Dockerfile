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
    && uv pip install --system --no-cache --no-index /tmp/wheel/*.whl \
    && rm -r /tmp/cuda.txt /tmp/wheel \
    && install -d -o 2000 -g 0 -m 0775 /var/lib/quarry \
       /home/vllm/.cache /home/vllm/.cache/huggingface /home/vllm/.cache/vllm

# The base image is prepared for this user; everything that caches writes below two folders, which are volumes.
USER 2000:0
ENV HOME=/home/vllm \
    HF_HOME=/home/vllm/.cache/huggingface \
    VLLM_CACHE_ROOT=/home/vllm/.cache/vllm \
    VLLM_CONFIG_ROOT=/home/vllm/.cache/vllm/config \
    TRITON_CACHE_DIR=/home/vllm/.cache/vllm/triton \
    FLASHINFER_WORKSPACE_BASE=/home/vllm/.cache/vllm \
    CUDA_CACHE_PATH=/home/vllm/.cache/vllm/cuda \
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
