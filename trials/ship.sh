# ship.sh: .scratch/k = branch ahead12 with exp.py; .scratch/trees/base = main's kernel sources; .scratch/plans
set -e; S=$ROOT/.scratch; rm -rf $S; mkdir -p $S/k $S/trees/base $S/plans
git -C $ROOT archive ${1:-ahead12} kog_dist workers collectives launch tests configs pyproject.toml Makefile | tar -x -C $S/k --exclude="*.safetensors" --exclude="*.png" --exclude="*.svg"
cp trials/exp.py $S/k/kog_dist/bench/exp.py; cp trials/plan_*.json $S/plans/
git -C $ROOT archive main workers/kernels workers/phases collectives/device | tar -x -C $S/trees/base
du -sh $S
# on the machine (x1, ~25 s a plan): cd .scratch/k && TREES=$PWD/../trees PYTHONPATH=$PWD timeout 100 python3 -m kog_dist.bench.exp ../plans/plan_l2.json $OUT/l2.json 1
