export XLA_PYTHON_CLIENT_PREALLOCATE=false
for s in "qwen3 layer" "fine layer" "dsv3 layer"; do timeout 140 python3 prof.py "$s" "bf16,block cached,delayed cached" >> $OUT/prof.log 2>&1; done; grep "==\|Activated" $OUT/prof.log; 
