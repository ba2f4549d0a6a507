#!/bin/sh
# The presets of `dynatree bench paper` that a CPU can carry, on the bundled pair: sh benchmarks/paper.sh TEXTS [OUT]
#
# TEXTS is the folder of `make bench`: wikitext-2.txt, book.txt, c4.jsonl, openwebtext.jsonl and spec-bench.jsonl. The book
# stands for PG-19, and in DySpec's Figure 2 Spec-Bench for CNN DailyMail. It takes some half an hour of two quiet cores.
# What is in OUT already is not measured again. Then `make figures-write` puts the tables into docs/reference/papers.md.
set -eu
texts=$1
out=${2:-benchmarks/paper}
dynatree=${DYNATREE:-.venv/bin/dynatree}

dynatree_texts="--prompts wikitext-2=$texts/wikitext-2.txt --prompts $texts/book.txt"
# Table 1 of 003, which Tables 2 and 3 share, is as long as the paper's.
$dynatree bench paper --version 003 --table 1 $dynatree_texts --out "$out" ${SCALE:-}
$dynatree bench paper --version 003 --figure scaling $dynatree_texts --out "$out" --max-new-tokens 500 ${SCALE:-}
$dynatree bench paper --version 000 --version 001 --version 002 --version 003 $dynatree_texts --out "$out" \
  --max-new-tokens 200 ${SCALE:-}
dyspec_texts="--prompts c4=$texts/c4.jsonl --prompts openwebtext=$texts/openwebtext.jsonl"
$dynatree bench paper --version dyspec --table 1 $dyspec_texts --out "$out" --count 10 ${SCALE:-}
$dynatree bench paper --version dyspec --figure 2 --prompts "$texts/spec-bench.jsonl" --out "$out" --count 10 ${SCALE:-}
for item in "table 4" "figure 5" "figure 9"; do  # 768 nodes and more
  $dynatree bench paper --version dyspec --$item $dyspec_texts --out "$out" --count 10 --max-new-tokens 32 --warmup 1 ${SCALE:-}
done
