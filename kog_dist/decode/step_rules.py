"""What a single step of a plan may look like: which values its phase reads, which ones its labels say it writes."""

from __future__ import annotations

from collections.abc import Iterator

from kog_dist.decode.schedule import RankPlan
from kog_dist.decode.steps import NONE, Kind, Phase, Site, Step, Value
from kog_dist.model.spec import HeadType, ModelSpec


def value_name(value: Value) -> str:
    """A value in words."""
    parts = [value.kind.name]
    parts += [f"{name} {n}" for name, n in (("site", value.site), ("number", value.number), ("lane", value.lane)) if n != NONE]
    return " ".join(parts)


_PER_LAYER = (
    Phase.QKV, Phase.ATTEND, Phase.OUT, Phase.ROUTE, Phase.SELECT, Phase.GATE_UP, Phase.DOWN, Phase.RESIDUAL,
)  # fmt: skip
_PER_RANK = (Phase.SUM, Phase.TOTAL, Phase.HEAD_INPUT, Phase.GATHER, Phase.SAMPLE, Phase.ROUTE, Phase.SELECT)


def malformed(spec: ModelSpec, part: RankPlan, step: Step) -> Iterator[str]:
    """What is wrong with a step by itself: labels, kinds of what it reads, and that it writes what its labels say."""
    layer, lane, site = step.layer, step.lane, step.site
    per_layer = step.phase in _PER_LAYER or (step.phase in (Phase.SUM, Phase.TOTAL) and site != Site.FINAL)
    per_lane = step.phase not in _PER_RANK
    if spec.experts is None and step.phase in (Phase.ROUTE, Phase.SELECT):
        yield "the model has no experts"
        return
    if spec.has_one_stream and step.phase in (Phase.EMBED, Phase.RESIDUAL, Phase.FINAL_NORM):
        per_lane = False
    if (0 <= layer < spec.num_layers) != per_layer or (not per_layer and layer != NONE):
        yield f"layer {layer} does not fit the phase"
        return
    if (lane in part.lanes) != per_lane or (not per_lane and lane != NONE):
        yield f"lane {lane} does not fit the phase on a rank with lanes {part.lanes}"
        return
    sites: dict[Phase, tuple[int, ...]] = {
        Phase.SUM: tuple(Site), Phase.TOTAL: tuple(Site), Phase.HEAD_INPUT: (Site.FINAL,),
        Phase.RESIDUAL: (Site.ATTENTION, Site.MLP),
    }  # fmt: skip
    if site not in sites.get(step.phase, (NONE,)):
        yield f"site {site} does not fit the phase"
        return
    if step.writes != _written(spec, part, step):
        yield f"writes {', '.join(map(value_name, step.writes)) or 'nothing'}, which its labels do not say"
    if tuple(value.kind for value in step.reads) not in _readable(spec, part, step):
        yield f"reads {', '.join(map(value_name, step.reads)) or 'nothing'}, which the phase cannot use"
    if per_lane and any(value.lane not in (lane, NONE) for value in step.reads):
        yield f"reads {', '.join(map(value_name, step.reads))}, which belong to another lane"
    yield from _wrong_messages(part, step)


def _wrong_messages(part: RankPlan, step: Step) -> Iterator[str]:
    may_publish = step.phase in (Phase.SUM, Phase.HEAD_INPUT, Phase.GATHER, Phase.SAMPLE, Phase.SELECT)
    may_wait = step.phase in (Phase.TOTAL, Phase.HEAD_INPUT, Phase.GATHER, Phase.SAMPLE, Phase.SELECT)
    for message, allowed, verb in ((step.publishes, may_publish, "publishes to"), (step.waits, may_wait, "waits for")):
        if message is not None and not allowed:
            yield f"{verb} peers, which the phase does not do"
        elif message is not None and not message.peers:
            yield f"{verb} nobody"
        elif message is not None and (part.rank in message.peers or len(set(message.peers)) != len(message.peers)):
            yield f"{verb} {message.peers}, where it stands itself or a peer stands twice"


def _written(spec: ModelSpec, part: RankPlan, step: Step) -> tuple[Value, ...]:
    layer, lane, site = step.layer, step.lane, step.site
    match step.phase:
        case Phase.EMBED:
            return (Value(Kind.STREAM, 0, lane),)
        case Phase.QKV:
            return Value(Kind.QUERY, layer, lane), Value(Kind.CACHE, layer, lane)
        case Phase.ATTEND:
            return (Value(Kind.MIXED, layer, lane),)
        case Phase.OUT | Phase.DOWN:
            return (Value(Kind.PARTIAL, layer, lane, Site.ATTENTION if step.phase is Phase.OUT else Site.MLP),)
        case Phase.ROUTE:
            return (Value(Kind.ROUTER_LOGITS, layer),)
        case Phase.SELECT:
            return (Value(Kind.CHOICE, layer),)
        case Phase.GATE_UP:
            return (Value(Kind.ACTIVATION, layer, lane),)
        case Phase.SUM:
            return (Value(Kind.OWN_SUM, layer, site=site),)
        case Phase.TOTAL:
            return (Value(Kind.TOTAL, layer, site=site),)
        case Phase.RESIDUAL:
            return (Value(Kind.STREAM, 2 * layer + site + 1, lane),)
        case Phase.FINAL_NORM if spec.head_type is HeadType.VOCAB_PARALLEL or spec.has_one_stream:
            return (Value(Kind.HEAD_INPUT, lane=lane),)
        case Phase.FINAL_NORM:
            return (Value(Kind.PARTIAL, NONE, lane, Site.FINAL),)
        case Phase.HEAD_INPUT:
            return (Value(Kind.HEAD_INPUT),)
        case Phase.HEAD:
            return (Value(Kind.LOGITS, lane=lane),)
        case Phase.GATHER:
            return (Value(Kind.ALL_LOGITS),) if part.rank == 0 else ()
        case Phase.SAMPLE:
            return (Value(Kind.TOKEN),)


def _readable(spec: ModelSpec, part: RankPlan, step: Step) -> tuple[tuple[Kind, ...], ...]:
    """The combinations of kinds that a phase can read."""
    lanes = len(part.lanes)
    chosen = () if spec.experts is None else (Kind.CHOICE,)
    match step.phase:
        case Phase.EMBED:
            return ((),)
        case Phase.QKV | Phase.ROUTE | Phase.FINAL_NORM:
            return ((Kind.STREAM,),)
        case Phase.SELECT:
            return ((Kind.ROUTER_LOGITS,),)
        case Phase.GATE_UP:
            return ((Kind.STREAM, *chosen),)
        case Phase.ATTEND:
            return ((Kind.QUERY, Kind.CACHE),)
        case Phase.OUT:
            return ((Kind.MIXED,),)
        case Phase.DOWN:
            return ((Kind.ACTIVATION, *chosen),)
        case Phase.SUM:
            of_streams = step.site == Site.FINAL and spec.pre_norm_lane_agg
            return ((Kind.STREAM if of_streams else Kind.PARTIAL,) * lanes,)
        case Phase.TOTAL:
            return ((Kind.OWN_SUM,),)
        case Phase.RESIDUAL:
            first = (Kind.STREAM, Kind.PARTIAL)
            return first, (Kind.STREAM, Kind.TOTAL), (*first, Kind.TOTAL, Kind.PARTIAL)
        case Phase.HEAD_INPUT:
            return ((Kind.TOTAL,),) if spec.head_type is HeadType.REPLICATE else ((Kind.PARTIAL,) * lanes,)
        case Phase.HEAD:
            return ((Kind.HEAD_INPUT,),)
        case Phase.GATHER | Phase.SAMPLE:
            return ((Kind.LOGITS,) * lanes,)
