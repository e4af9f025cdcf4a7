"""llama.cpp's own server, by the package xllamacpp: for machines that have no llama-server. Needs nothing of kog_dist."""

import argparse
import signal

import xllamacpp  # type: ignore[import-not-found]


def main() -> None:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context", type=int, required=True, help="of all slots")
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--gpu-layers", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--lookup", action="store_true", help="drafts of the prompt and the answer")
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.n_gpu_layers = options.model, options.port, options.gpu_layers
    params.n_ctx, params.n_parallel = options.context, options.slots
    if options.threads:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    if options.lookup:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
