"""ab.py TREES_DIR: base and wake in turn, one model. Ends by itself after 150 s."""
import os, subprocess, sys, time
trees = sys.argv[1]; begin = time.monotonic()
sys.path.insert(0, f"{trees}/base")
from kog_dist.bench.random_model import random_model
with random_model("2b", on_gpus=True) as (folder, spec):
    for name in ("base", "wake", "wake", "base"):
        left = 150 - (time.monotonic() - begin)
        if left < 15: break
        env = {**os.environ, "PYTHONPATH": f"{trees}/{name}:/tmp/site"}
        try: subprocess.run([sys.executable, os.path.dirname(os.path.abspath(__file__)) + "/first_tokens.py", str(folder), name, "512,2048,4000", "40"], env=env, cwd=f"{trees}/{name}", timeout=left)
        except subprocess.TimeoutExpired: print(name, "cut")
print(f"{time.monotonic()-begin:.0f} s")
