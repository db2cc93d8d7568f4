# unfuse on CPUs. From the repository's root, after `make dist`:  docker build -f deploy/docker/cpu.Dockerfile -t unfuse:0.1.0 .
FROM python:3.12-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
COPY constraints.txt /tmp/constraints.txt
RUN pip install --index-url https://download.pytorch.org/whl/cpu --extra-index-url https://pypi.org/simple \
    --constraint /tmp/constraints.txt torch
COPY dist/*.whl /tmp/dist/
RUN pip install --constraint /tmp/constraints.txt "$(ls /tmp/dist/*.whl)[serve,redis,s3,lora,operator]" \
    && rm -r /tmp/dist /tmp/constraints.txt \
    && useradd --create-home --uid 10001 unfuse && install -d -o unfuse -g unfuse -m 700 /data /run/unfuse

USER 10001:10001
ENV UNFUSE_DATA_DIR=/data UNFUSE_RUN_DIR=/run/unfuse HF_HOME=/data/models UNFUSE_LOG__FORMAT=json
VOLUME /data
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=10m CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["unfuse"]
CMD ["serve"]
