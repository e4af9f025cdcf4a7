import sys
from kog_dist.bench.shapes import named_spec, SEED
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.device_weights import random_weights
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.bench.latency import token_times_us
from kog_dist.bench.exp import parse
import statistics
spec = named_spec("2b")
shape = KernelShape(spec, range(2), **parse(sys.argv[1]))
k = Monokernel(shape, random_weights(shape, SEED), wait_limit_us=2_000_000)
for _ in range(3):
    t = token_times_us(k, 64, 100)
    print(statistics.median(t), flush=True)
