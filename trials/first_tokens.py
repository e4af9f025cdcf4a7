"""First tokens of an engine of the tree in PYTHONPATH: first_tokens.py MODEL NAME PROMPTS REPEATS"""
import json, sys
from kog_dist.bench.request_client import RequestClient
from kog_dist.bench.request_measures import Measures, Workload
from kog_dist.bench.session import engine_session
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.rpc.transport import Access
from pathlib import Path
folder, name, prompts, repeats = sys.argv[1:5]
spec = open_checkpoint(Path(folder), verify=False).spec
workload = Workload(tuple(map(int, prompts.split(","))), 0, 0, 512, 3, int(repeats))
with engine_session() as session:
    launcher = session.launch(folder, "--gpus=1", "--prefill=on")
    session.connect(120).close()
    client = RequestClient(Access.from_folder(session.instance_folder))
    measures = Measures(client, spec, workload); measures.warm_up()
    for figure in measures.first_tokens():
        for key, steps in (("ms", "steps_ms"), ("rested_ms", "rested_steps_ms")):
            late = {k: round(figure[steps][k], 3) for k in ("near", "prefilled", "chosen", "taken", "sent", "in the client") if k in figure[steps]}
            print(f"{name:>6} {figure['prompt']:>5} {key:>9} {figure[key]:7.3f}  {late}", flush=True)
    client.close()
