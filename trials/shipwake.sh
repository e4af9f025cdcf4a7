set -e; S=$ROOT/.scratch; mkdir -p $S/w/base $S/w/wake
for t in base:main wake:wake12; do n=${t%%:*}; r=${t##*:}; git -C $ROOT archive $r kog_dist workers collectives launch tests configs pyproject.toml Makefile | tar -x -C $S/w/$n --exclude="*.safetensors" --exclude="*.png" --exclude="*.svg"; done
cp trials/ab.py trials/first_tokens.py $S/w/; du -sh $S
# on the machine: pip install --no-deps --no-index --target /tmp/site .whl/*.whl; XDG_CACHE_HOME=/tmp/kogcache timeout 160 python3 .scratch/w/ab.py $PWD/.scratch/w
