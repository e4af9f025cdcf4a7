"""What a single step of a plan may look like: which values its phase reads, which ones its labels say it writes."""

from __future__ import annotations

from collections.abc import Iterator

from kog_dist.decode.plan.recipes import all_recipes, recipe_of, stream_lanes
from kog_dist.decode.plan.schedule import RankPlan
from kog_dist.decode.plan.steps import NONE, Kind, Phase, Site, Step, Value
from kog_dist.model.spec import HeadType, ModelSpec


def value_name(value: Value) -> str:
    """A value in words."""
    parts = [value.kind.name]
    parts += [f"{name} {n}" for name, n in (("site", value.site), ("number", value.number), ("lane", value.lane)) if n != NONE]
    return " ".join(parts)


_PER_RANK = (Phase.SUM, Phase.TOTAL, Phase.HEAD_INPUT, Phase.GATHER, Phase.SAMPLE)
_OF_STREAMS = (Phase.EMBED, Phase.RESIDUAL, Phase.FINAL_NORM)
# All that belongs to no recipe.
_COMMON = (*_PER_RANK, *_OF_STREAMS, Phase.HEAD)
_SITES: dict[Phase, tuple[int, ...]] = {  # of the others none
    Phase.SUM: tuple(Site),
    Phase.TOTAL: tuple(Site),
    Phase.HEAD_INPUT: (Site.FINAL,),
    Phase.RESIDUAL: (Site.ATTENTION, Site.MLP),
}


def malformed(spec: ModelSpec, part: RankPlan, step: Step) -> Iterator[str]:
    """What is wrong with a step by itself: labels, kinds of what it reads, and that it writes what its labels say."""
    layer, lane, site = step.layer, step.lane, step.site
    if step.phase not in _COMMON and not any(recipe.stage(step.phase) for recipe in all_recipes(spec)):
        yield f"the model has no layer with {step.phase.name}"
        return
    recipe = recipe_of(spec, layer, step.phase)
    fits = recipe is not None
    if step.phase in _COMMON:
        is_of_layer = step.phase is Phase.RESIDUAL or (step.phase in (Phase.SUM, Phase.TOTAL) and site != Site.FINAL)
        fits = 0 <= layer < spec.num_layers if is_of_layer else layer == NONE
    if not fits:
        yield f"layer {layer} does not fit the phase"
        return
    stage = recipe.stage(step.phase) if recipe is not None else None
    has_lane = stage.is_by_lane if stage is not None else step.phase not in _PER_RANK
    lanes = stream_lanes(spec, part.lanes) if step.phase in _OF_STREAMS else part.lanes if has_lane else (NONE,)
    if lane not in lanes:
        yield f"lane {lane} does not fit the phase on a rank with lanes {part.lanes}"
        return
    if site not in _SITES.get(step.phase, (NONE,)):
        yield f"site {site} does not fit the phase"
        return
    if step.writes != (_written(spec, part, step) if recipe is None else recipe.writes(step.phase, layer, lane)):
        yield f"writes {', '.join(map(value_name, step.writes)) or 'nothing'}, which its labels do not say"
    if tuple(value.kind for value in step.reads) not in (_readable(spec, part, step) if stage is None else (stage.reads,)):
        yield f"reads {', '.join(map(value_name, step.reads)) or 'nothing'}, which the phase cannot use"
    if lane != NONE and any(value.lane not in (lane, NONE) for value in step.reads):
        yield f"reads {', '.join(map(value_name, step.reads))}, which belong to another lane"
    yield from _wrong_messages(part, step, can_compare=stage is not None and bool(stage.compared_in))


def _wrong_messages(part: RankPlan, step: Step, *, can_compare: bool) -> Iterator[str]:
    may_publish = can_compare or step.phase in (Phase.SUM, Phase.HEAD_INPUT, Phase.GATHER, Phase.SAMPLE)
    may_wait = can_compare or step.phase in (Phase.TOTAL, Phase.HEAD_INPUT, Phase.GATHER, Phase.SAMPLE)
    for message, allowed, verb in ((step.publishes, may_publish, "publishes to"), (step.waits, may_wait, "waits for")):
        if message is not None and not allowed:
            yield f"{verb} peers, which the phase does not do"
        elif message is not None and not message.peers:
            yield f"{verb} nobody"
        elif message is not None and (part.rank in message.peers or len(set(message.peers)) != len(message.peers)):
            yield f"{verb} {message.peers}, where it stands itself or a peer stands twice"


def _written(spec: ModelSpec, part: RankPlan, step: Step) -> tuple[Value, ...]:
    """By a step that is of no recipe."""
    layer, lane, site = step.layer, step.lane, step.site
    match step.phase:
        case Phase.EMBED:
            return (Value(Kind.STREAM, 0, lane),)
        case Phase.SUM:
            return (Value(Kind.OWN_SUM, layer, site=site),)
        case Phase.TOTAL:
            return (Value(Kind.TOTAL, layer, site=site),)
        case Phase.RESIDUAL:
            return (Value(Kind.STREAM, 2 * layer + site + 1, lane),)
        case Phase.FINAL_NORM if spec.head_type is HeadType.VOCAB_PARALLEL or lane == NONE:
            return (Value(Kind.HEAD_INPUT, lane=lane),)
        case Phase.FINAL_NORM:
            return (Value(Kind.PARTIAL, NONE, lane, Site.FINAL),)
        case Phase.HEAD_INPUT:
            return (Value(Kind.HEAD_INPUT),)
        case Phase.HEAD:
            return (Value(Kind.LOGITS, lane=lane),)
        case Phase.GATHER:
            return (Value(Kind.ALL_LOGITS),) if part.rank == 0 else ()
        case _:
            return (Value(Kind.TOKEN),)


def _readable(spec: ModelSpec, part: RankPlan, step: Step) -> tuple[tuple[Kind, ...], ...]:
    """The combinations of kinds that a phase of no recipe can read."""
    lanes = len(part.lanes)
    match step.phase:
        case Phase.EMBED:
            return ((),)
        case Phase.FINAL_NORM:
            return ((Kind.STREAM,),)
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
        case _:
            return ((Kind.LOGITS,) * lanes,)
