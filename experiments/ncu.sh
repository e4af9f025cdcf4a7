export PYTHONPATH=$PWD XDG_CACHE_HOME=${XDG_CACHE_HOME:-/tmp/cache}
B="pieces=2,pieces_in_flight=5,order=tail+head"

for v in "" ",NOLOAD"; do n=${v#,}
timeout 60 ncu --clock-control none --kernel-name kog_decode --launch-skip 1 --launch-count 1 --section SourceCounters --section WarpStateStats --warp-sampling-interval 0 --warp-sampling-buffer-size 134217728 --warp-sampling-max-passes 1 -f -o /tmp/rep$n python3 experiments/ncu_run.py "$B$v" > $OUT/ncu$n.log 2>&1; tail -5 $OUT/ncu$n.log
timeout 40 ncu -i /tmp/rep$n.ncu-rep --page source --csv --print-units base > $OUT/src$n.csv 2>&1; wc $OUT/src$n.csv
timeout 20 ncu -i /tmp/rep$n.ncu-rep --page details 2>&1 | tail -40 > $OUT/det$n.txt
done
gzip $OUT/src*.csv; ls -la $OUT
