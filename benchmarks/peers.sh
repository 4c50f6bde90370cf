#!/bin/sh
# Installs what `benchmarks/smtp.py` compares with, each from its ordinary registry:
# Postfix (smtp-source, relay) and Node from Debian, nodemailer from npm, aiosmtplib and Jinja2 from PyPI.
# Usage: benchmarks/peers.sh [FOLDER]   (default: ~/.cache/rowpost-peers; pass the same to smtp.py --peers)
set -eu
folder="${1:-${XDG_CACHE_HOME:-$HOME/.cache}/rowpost-peers}"
mkdir -p "$folder"
if ! command -v smtp-source >/dev/null 2>&1 && [ ! -x /usr/sbin/smtp-source ]; then
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends postfix
fi
command -v npm >/dev/null 2>&1 || apt-get install -y --no-install-recommends nodejs npm
command -v cc >/dev/null 2>&1 || apt-get install -y --no-install-recommends gcc libc6-dev libssl-dev
[ -d "$folder/node_modules/nodemailer" ] || npm install --prefix "$folder" --no-audit --no-fund nodemailer
python3 -c "import aiosmtplib, jinja2" 2>/dev/null || python3 -m pip install aiosmtplib jinja2
echo "$folder"
