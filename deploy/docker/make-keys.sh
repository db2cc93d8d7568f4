#!/bin/sh
# Creates the secrets of compose.yml: keys.txt, a key file with hashes, and metrics.key, the read-only key of Prometheus.
# Prints the admin key for clients, which is not stored. Fails if the secrets already exist.
set -eu
cd "$(dirname "$0")"
mkdir -m 700 secrets

new_key() {
    head -c 24 /dev/urandom | od -An -v -tx1 | tr -d ' \n'
}

# NAME KEY RIGHT
add() {
    printf '%s sha256:%s %s\n' "$1" "$(printf %s "$2" | sha256sum | cut -d ' ' -f 1)" "$3" >> secrets/keys.txt
}

key=$(new_key)
metrics=$(new_key)
add studio "$key" admin=yes
add prometheus "$metrics" read=yes
printf %s "$metrics" > secrets/metrics.key

# readable by the users in the containers; the folder denies access to others
chmod 644 secrets/keys.txt secrets/metrics.key
echo "$key"
