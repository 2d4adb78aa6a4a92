#!/bin/sh
# The fake driver's nvidia-smi: prints the cards whose device nodes this container has, and its share of each.
# Where it reads the cards of the node, each line is: uuid|index|minor|memory in MiB|product.
limits=/etc/quotient/limits.json

# Prints a number of one card in the limits file.
share_of() {
  sed 's/.*"cards":\[//; s/},{/\n/g' "$limits" | sed -n "/\"uuid\":\"$1\"/s/.*\"$2\":\([0-9]*\).*/\1/p"
}

row='| %3s  %-21s  %-40s | %5s | %20s |\n'
line='+----------------------------------------------------------------------+-------+----------------------+'
echo "NVIDIA-SMI @VERSION@ (fake driver, no GPU behind it)"
echo "$line"
printf "$row" GPU Name UUID Cores Memory
echo "$line"
while IFS='|' read -r uuid index minor memory product; do
  test -e "/dev/nvidia$minor" || continue
  printf "$row" "$index" "$product" "$uuid" "$(share_of "$uuid" cores) %" "$(share_of "$uuid" memoryMiB) of $memory MiB"
done <<CARDS
@CARDS@
CARDS
echo "$line"
