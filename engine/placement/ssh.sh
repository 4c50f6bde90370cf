#!/bin/sh
# One sender on each host, by ssh; started again while it asks for that (exit code 75).
#   HOSTS="mail1 mail2 mail3" ROWPOST_CONTROL=postgresql://rowpost@db.example.com/rowpost sh ssh.sh
# The hosts have `engine` installed and the store's password in ~/.pgpass.
set -u
: "${HOSTS:?name the hosts, in the order of their partitions}" "${ROWPOST_CONTROL:?}"
partition=0
for host in $HOSTS; do
    # shellcheck disable=SC2029 # what is not escaped is known on this side
    ssh "$host" "while :; do
            ROWPOST_CONTROL='$ROWPOST_CONTROL' engine send --partition $partition --yes \
                --campaign rowpost/partition-$partition --name $host >>rowpost-$partition.log 2>&1
            code=\$?; [ \$code -eq 75 ] || exit \$code; sleep 10
        done" &
    partition=$((partition + 1))
done
wait
