"""How one token is decoded: the plan, its validator, the interpreter, sampling, weight tapes and the token ring."""
