"""`/api/tags`, `/api/show`, `/api/ps` and `/api/version`: the model in Ollama's words."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any, Final

from kog_dist.gateway.ollama.plans import own_name
from kog_dist.gateway.ollama.requests import ShowBody
from kog_dist.gateway.openai.body import parse
from kog_dist.gateway.openai.planning import check_model
from kog_dist.gateway.openai.served import DEFAULT_ALIAS, ServedModel
from kog_dist.model.generation_config import shown_sampling
from kog_dist.records import dataclass

API_LEVEL: Final = "0.12.0"  # of Ollama, whose API this is; clients refuse to talk to what they take for an older one


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What the gateway knows of a model's weights: 0 and "" where it knows nothing."""

    num_parameters: int
    num_bytes: int
    weights_format: str


def tags(served: ServedModel, size: ModelSize) -> dict[str, Any]:
    """The model, once for each of its names."""
    return {"models": [_entry(served, size, name) for name in served.names if name != DEFAULT_ALIAS]}


def running(served: ServedModel, size: ModelSize) -> dict[str, object]:
    """The same: it is always loaded."""
    kept = {"expires_at": "9999-12-31T23:59:59Z", "context_length": served.max_context}
    return {"models": [{**entry, **kept, "size_vram": entry["size"]} for entry in tags(served, size)["models"]]}


def show(body: object, served: ServedModel) -> dict[str, object]:
    """What clients ask of a model before they use it. Raises ApiError."""
    request = parse(ShowBody, body, leaves_out=served.leaves_out_unknown)
    name = request.model or request.name
    check_model(None if name is None else own_name(name, served), served)
    template = served.chat_template
    style = served.style
    capabilities = ["completion"]
    if template is not None and style.tools != "none":
        capabilities.append("tools")
    if template is not None and style.reasoning != "none":
        capabilities.append("thinking")
    return {
        "modelfile": "",
        "parameters": shown_sampling(served.defaults).replace(", ", "\n"),
        "modified_at": _time(served),
        "template": "" if template is None else template.source,
        "capabilities": capabilities,
        "details": {"parent_model": "", "format": "", "family": "kog", "families": ["kog"]},
        "model_info": {"general.architecture": "kog", "kog.context_length": served.max_context},
    }


def _entry(served: ServedModel, size: ModelSize, name: str) -> dict[str, object]:
    return {
        "name": name,
        "model": name,
        "modified_at": _time(served),
        "size": size.num_bytes,
        "digest": hashlib.sha256(served.name.encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": "",
            "family": "kog",
            "families": ["kog"],
            "parameter_size": _parameters(size.num_parameters),
            "quantization_level": size.weights_format,
        },
    }


def _parameters(count: int) -> str:
    if not count:
        return ""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


def _time(served: ServedModel) -> str:
    return datetime.fromtimestamp(served.created, UTC).isoformat().replace("+00:00", "Z")
