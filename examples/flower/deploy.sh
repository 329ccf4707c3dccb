#!/usr/bin/env bash
# A SuperLink and two SuperNodes on loopback, with TLS and node authentication; two rounds of the
# app beside this file; then everything that was started is stopped. Needs openssl.
set -euo pipefail
cd "$(dirname "$0")"
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
work=$(mktemp -d)
export FLWR_HOME="$work/home"
mkdir -p "$FLWR_HOME"
tree() {  # a process and all that it started, by their ids
  for child in $(pgrep -P "$1"); do tree "$child"; done
  echo "$1"
}
stop() {
  started=()
  for pid in $(pgrep -P $$); do started+=($(tree "$pid")); done
  kill "${started[@]}" 2>/dev/null || true
  for _ in $(seq 20); do  # ten seconds to end in good order
    kill -0 "${started[@]}" 2>/dev/null || break
    sleep 0.5
  done
  kill -9 "${started[@]}" 2>/dev/null || true
  rm -rf "$work"
}
trap stop EXIT
start() {
  log=$1
  shift
  "$@" > "$log" 2>&1 &
}

# Certificates of an authority of our own, for 127.0.0.1.
openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj "/CN=ca" \
  -keyout "$work/ca.key" -out "$work/ca.pem" 2>/dev/null
openssl req -newkey rsa:2048 -nodes -subj "/CN=127.0.0.1" \
  -keyout "$work/server.key" -out "$work/server.csr" 2>/dev/null
printf 'subjectAltName=IP:127.0.0.1,DNS:localhost\n' > "$work/names"
openssl x509 -req -in "$work/server.csr" -CA "$work/ca.pem" -CAkey "$work/ca.key" -days 1 \
  -CAcreateserial -extfile "$work/names" -out "$work/server.pem" 2>/dev/null

start "$work/superlink.log" flower-superlink --ssl-ca-certfile "$work/ca.pem" \
  --ssl-certfile "$work/server.pem" --ssl-keyfile "$work/server.key" --enable-supernode-auth
cat > "$FLWR_HOME/config.toml" <<EOF
[superlink]
default = "local"

[superlink.local]
address = "127.0.0.1:8000"
root-certificates = "$work/ca.pem"
EOF
for _ in $(seq 120); do
  if (: < /dev/tcp/127.0.0.1/8000) 2>/dev/null; then break; fi
  sleep 0.5
done

for node in 0 1; do
  ssh-keygen -q -t ecdsa -b 384 -N "" -f "$work/node$node"
  flwr supernode register "$work/node$node.pub" local
  start "$work/node$node.log" flower-supernode --root-certificates "$work/ca.pem" \
    --superlink 127.0.0.1:8000 --auth-supernode-private-key "$work/node$node" \
    --port "910$node" --node-config "partition-id=$node num-partitions=2"
done

flwr run . local --stream --run-config "spy=\"$work/spy\""
ls -l "$work/spy/round-0001"
