#!/usr/bin/env bash
# From Wikipedia text to two trained models and a picture of their loss curves, on a CPU, in a few minutes.
#
#   bash scripts/quickstart.sh
#
# Makes .venv/, data/quickstart/ (a real excerpt of English Wikipedia as HDF5 shards), runs/quickstart/torch/ and
# runs/quickstart/tempo/ (the same tiny BERT with PyTorch's layers and with Tempo's), runs/quickstart/compare.png.
# Run again, it keeps what is there; delete runs/quickstart to train anew, data/quickstart to prepare the data anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
  "") ;;
  -h | --help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  *) echo "error: unknown argument '$1' (try --help)" >&2; exit 2 ;;
esac

data=data/quickstart
runs=runs/quickstart
# The wheel of gensim carries an excerpt of a Wikipedia dump; nothing of gensim is installed.
gensim_version=4.4.0
dump=enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }

download_dump() {
  [ -f "$data/$dump" ] && return
  local download
  mkdir -p "$data"
  download=$(mktemp -d "$data/download.XXXXXX")
  trap 'rm -rf "$download"' RETURN
  # Any wheel will do, whatever Python runs here: only its test data is wanted.
  .venv/bin/pip download --no-deps --only-binary :all: --python-version 3.11 \
    --platform manylinux_2_24_x86_64 --platform manylinux_2_28_x86_64 --dest "$download" "gensim==$gensim_version"
  .venv/bin/python - "$download" "$dump" "$data" <<'PYTHON'
import pathlib, shutil, sys, zipfile
download, dump, data = sys.argv[1:]
(wheel,) = pathlib.Path(download).glob("*.whl")
unfinished = pathlib.Path(data, dump + ".part")
with zipfile.ZipFile(wheel) as archive, archive.open("gensim/test/test_data/" + dump) as source:
    with unfinished.open("wb") as target:
        shutil.copyfileobj(source, target)
unfinished.rename(pathlib.Path(data, dump))
PYTHON
}

say "1/4  Installing (into .venv/)"
bash scripts/install.sh
export PYTHONUNBUFFERED=1 TEMPO_PROGRESS=1

say "2/4  English Wikipedia, 106 articles -> $data/shards"
download_dump
.venv/bin/python -m data_prep build --source "wikipedia-dump:$data/$dump" --train-vocab 8192 \
  --max-seq-length 128 --num-shards 4 --eval-fraction 0.05 --output "$data/shards"

say "3/4  Pretraining a tiny BERT twice: layers of PyTorch, then layers of Tempo"
for layers in torch tempo; do
  .venv/bin/python run_pretraining.py --config configs/quickstart.yaml --data.path "$data/shards" \
    --model.layers "$layers" --train.output_dir "$runs/$layers"
done

say "4/4  Comparing"
.venv/bin/python -m pretrain.compare "$runs/torch" "$runs/tempo" --output "$runs/compare.png"
