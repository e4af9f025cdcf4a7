"""Examples below every `--help`, by command. `tests/unit/test_documented_flags.py` parses each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

EXAMPLES: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "kog-launch": (
        ("kog-launch", "the demo model, served at http://127.0.0.1:8000"),
        ("kog-launch Qwen/Qwen3-4B --gpus 2", "a downloaded model on two GPUs"),
        ("kog-launch MODEL --dry-run", "what it would take and reach; starts nothing"),
        ('kog-launch --prompt "def is_even(n):" --max-tokens 40', "one answer, then exit"),
    ),
    "kog-chat": (
        ("kog-chat", "talk to the engine of this machine"),
        ('kog-chat --completion "def is_even(n):"', "have a base model continue a text"),
        ("kog-chat --url http://127.0.0.1:8000 < question.txt", "one answer to standard output"),
    ),
    "kog-gateway": (
        ("kog-gateway --instance prod --port 8001", "another HTTP service in front of an engine"),
        ("kog-gateway --key-file rpc-access.json --model MODEL", "of an engine on another machine"),
    ),
    "kog-client": (
        ("kog-client list", "which engines run here"),
        ("kog-client status", "what the engine does"),
        ('kog-client generate --prompt "def is_even(n):"', "decode a prompt"),
        ("kog-client stop", "end it once the running request has ended"),
        ("kog-client logs --follow", "what it logs"),
    ),
    "kog-client generate": (
        ('kog-client generate --prompt "class Stack:" --temperature 0.7 --seed 1', "the same tokens each time"),
        ("kog-client generate --prompt-ids 1,2,3 --json", "token ids; one JSON object"),
    ),
    "kog-client status": (("kog-client status --instance prod --json", "of a named engine, for programs"),),
    "kog-client list": (("kog-client list", "a line for each"),),
    "kog-client cancel": (("kog-client cancel", "the request that runs"),),
    "kog-client drain": (("kog-client drain --instance prod", "a named engine"),),
    "kog-client stop": (
        ("kog-client stop --instance prod --now", "at once; clients are told"),
        ("kog-client stop --ray head:6379", "wherever on the cluster its launcher runs"),
    ),
    "kog-client logs": (
        ("kog-client logs", "what the launcher has said"),
        ("kog-client logs gateway --lines 100 --follow", "requests, as they end"),
        ("kog-client logs rank-0 --ray auto", "from the node that the rank is on"),
    ),
    "kog-bench": (
        ("kog-bench latency --random --spec llama-3.2-1b --lanes 4", "the kernel on one GPU, beside its ceiling"),
        ("kog-bench serve --url http://127.0.0.1:8000", "load on any OpenAI-compatible server"),
        ("kog-bench --json decode --ranks 1,2", "CPU ranks; figures as JSON, too"),
    ),
    "kog-bench passes": (
        ("kog-bench passes MODEL --prompts 1500,6000 --kinds prose", "by processor time, on a machine that does other work"),
    ),
    "kog-bench drafts": (("kog-bench drafts MODEL --ranks 1 --repeats 3", "how much faster edits and quotes come"),),
    "kog-bench peers": (
        ("kog-bench peers --model DIR --gpus 1 --against vllm,llamacpp --gguf FILE", "what is there, with drafts and without"),
        ("kog-bench peers --model FILE.gguf --threads 1 --against xllamacpp --loads edit,prose", "on a CPU"),
    ),
    "kog-bench decode": (("kog-bench decode --ranks 1,2,4,8 -o decode.md -o decode.png", "a table and a picture, too"),),
    "kog-bench faults": (("kog-bench faults --ranks 4 --kills 20", ""),),
    "kog-bench chaos": (('kog-bench chaos --seconds 60 --only "gateway stop"', "only rows with this in their names"),),
    "kog-bench load": (("kog-bench load --spec 2b", ""),),
    "kog-bench latency": (("kog-bench latency --random --spec llama-3.2-1b --lanes 4 --baseline dense", "beside torch"),),
    "kog-bench prefill": (("kog-bench prefill --spec 2b", ""),),
    "kog-bench inspect": (("kog-bench inspect MODEL --layers 0,3,5", ""),),
    "kog-bench router": (
        ("kog-bench router", ""),
        ("kog-bench router --agents 16 --replicas 4", "how much of what replicas have kept is used"),
    ),
    "kog-bench requests": (("kog-bench requests --gpus 1 --spec 2b", ""),),
    "kog-bench first-token": (("kog-bench first-token --prompts 128,2048", ""),),
    "kog-bench soak": (
        ("kog-bench soak --requests 10000 --ranks 2 --clients 6 --seed 1", ""),
        ("kog-bench soak --long --ranks 1", "kept prefixes that are forgotten all the time"),
    ),
    "kog-bench replay": (("kog-bench replay --rate 2000 --instance replayed", ""),),
    "kog-bench serve": (("kog-bench serve --url http://127.0.0.1:8000 --num-prompts 20", ""),),
    "kog-bench agents": (
        ("kog-bench agents --url http://127.0.0.1:8000 --ignore-eos", "an agent with 20,000 tokens of context"),
    ),
    "kog-bench compare": (("kog-bench compare a.json b.json --fail-if-slower 5", ""),),
    "kog-bench gateway": (("kog-bench gateway --rate 500 --tokens 200 --repeats 1", ""),),
    "kog-bench collectives": (("kog-bench collectives --gpus 2 --out results", "table, collectives.json and a picture"),),
    "kog-bench scaling": (("kog-bench scaling --gpus 2,1 --spec qwen3-4b@9216 --contexts 512,8000", ""),),
    "kog-bench endurance": (("kog-bench endurance --gpus 2,1 --tokens 100000", ""),),
    "kog-bench make-model": (
        ("kog-bench make-model --spec llama-3.1-8b --out made", "random weights"),
        ("kog-bench make-model --spec qwen3-4b --chain answer.txt --out made", "it writes answer.txt, whatever it is asked"),
    ),
    "kog-bench quality": (("kog-bench quality MODEL --text docs/architecture.md -o quality.md", "every format; minutes"),),
}


def examples(command: str) -> str:
    """What `--help` of a command shows last."""
    lines = ["\b", "Examples:"]
    for shown, meaning in EXAMPLES[command]:
        lines += [f"  {shown}", *([f"      {meaning}"] if meaning else [])]
    return "\n".join(lines)
