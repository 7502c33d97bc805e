#!/usr/bin/env python3
"""serve_llama.py GGUF PORT SLOTS THREADS: llama.cpp's server, as the package xllamacpp ships it. A
peer for scripts/bench.py."""

import signal
import sys

import xllamacpp


def main() -> None:
    model, port, slots, threads = sys.argv[1], *map(int, sys.argv[2:])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.port = port
    params.n_parallel = slots
    params.n_ctx = slots * 1024
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    print(xllamacpp.get_system_info(), server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
