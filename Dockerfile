# docker build -t ultrascale . && docker run --rm -it ultrascale
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends \
    gcc libc6-dev make pkg-config openmpi-bin libopenmpi-dev libopenblas-dev libcjson-dev && rm -rf /var/lib/apt/lists/*
COPY . /ultrascale
WORKDIR /ultrascale
# Built where it will run: -march=native is the machine that runs the image, not the one that makes it.
CMD ["make", "demo"]
