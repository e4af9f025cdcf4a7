"""The flags that shape a choice, the same of `kog-client generate` and `kog-launch --prompt`; see `shaping_options`."""

from __future__ import annotations

from typing import Annotated

import typer

TopK = Annotated[int | None, typer.Option(help="Draw from the K best tokens only. 0: all.")]
TopP = Annotated[float | None, typer.Option(help="Draw from the best tokens that have this probability together. 1: all.")]
MinP = Annotated[float | None, typer.Option(help="Leave out tokens with less than this share of the best one's probability.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Divide logits of tokens in prompt or answer. 1: do not.")]
PresencePenalty = Annotated[float | None, typer.Option(help="Lower logits of tokens in the answer by this.")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="Lower them by this for each time.")]
LogitBias = Annotated[
    list[str] | None, typer.Option(metavar="ID=BIAS", help="Add BIAS to the logit of a token; may be given several times.")
]
MinTokens = Annotated[int | None, typer.Option(help="Tokens before the answer may end by itself.")]
Logprobs = Annotated[int | None, typer.Option(help="Log-probabilities of the tokens and of so many alternatives, up to 20.")]
JsonSchema = Annotated[str | None, typer.Option(metavar="TEXT|@FILE", help="The answer is JSON that satisfies this schema.")]
Regex = Annotated[str | None, typer.Option(help="The answer, as a whole, matches this regular expression.")]
