"""OpenAI's HTTP APIs as pure functions: a request body in, RPC messages and the bytes of the answer out. No sockets.

    from kog_dist.gateway.openai.body import read_body          # bytes -> JSON; raises ApiError
    from kog_dist.gateway.openai.chat import ChatRequest, plan_chat
    from kog_dist.gateway.openai.completions import CompletionRequest, plan_completion
    from kog_dist.gateway.openai.responses import ResponsesRequest, plan_response
    from kog_dist.gateway.openai.served import ServedModel
    from kog_dist.gateway.openai.errors import ApiError, from_rpc

    plan_*(body: object, served: ServedModel) -> Planned        # body: parsed JSON; raises ApiError

Planning a chat renders a template in a child process and tokenizes the prompt: call it in a thread. Which fields of OpenAI are
supported, ignored or refused, and why: docs/openai.md.
"""
