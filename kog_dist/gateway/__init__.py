"""The HTTP service: one process that speaks HTTP and SSE to clients and RPC to an engine or a router.

args, process, cli    what the process is told, and its two entries: a child of `kog-launch`, and `kog-gateway`
bind                  the port, taken before anything else is done; who holds it otherwise
engine                the only place that talks RPC: many requests over few connections, in asyncio
readiness             loading, ready, degraded, draining, failed, and why
app, endpoints, pages what is served; openai/ translates, static/ is the playground
guard, body, streams  who may ask, what may be asked, and how an answer is written to a slow reader
metrics, logs         what operators read
"""
