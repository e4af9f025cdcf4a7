"""`/props` and `/slots` in llama.cpp's form, as far as they mean something here: what its clients ask before they begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kog_dist import __version__

if TYPE_CHECKING:
    from kog_dist.gateway.openai.served import ServedModel
    from kog_dist.rpc.messages import StatusReport


def props(served: ServedModel, report: StatusReport | None) -> dict[str, object]:
    """The model: context, defaults of sampling, chat template. Its folder is nobody's business: `model_path` is its name."""
    defaults, template = served.defaults, served.chat_template
    specials = {} if served.tokenizer is None else served.tokenizer.special_tokens
    return {
        "default_generation_settings": {
            "n_ctx": served.max_context,
            "params": {
                "temperature": defaults.temperature,
                "top_k": defaults.top_k,
                "top_p": defaults.top_p,
                "min_p": defaults.min_p,
                "repeat_penalty": defaults.repetition_penalty,
                "presence_penalty": defaults.presence_penalty,
                "frequency_penalty": defaults.frequency_penalty,
            },
        },
        "total_slots": len(_slots_run(report)),
        "model_alias": served.name,
        "model_path": served.name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": "" if template is None else template.source,
        "bos_token": specials.get("bos_token", ""),
        "eos_token": specials.get("eos_token", ""),
        "build_info": f"kog_dist {__version__}",
    }


def slots(served: ServedModel, report: StatusReport | None) -> list[dict[str, object]]:
    """One for each request that may be decoded at the same time; behind a router those of all engines."""
    return [
        {"id": index, "n_ctx": served.max_context, "speculative": False, "is_processing": runs}
        for index, runs in enumerate(_slots_run(report))
    ]


def _slots_run(report: StatusReport | None) -> list[bool]:
    """Whether each has a request."""
    if report is None:
        return [False]
    return [number < report.num_running for number in range(report.parallel)]
