# Bring va back, with all that the kernel forgets of an interface that goes down.
set -eu
ip link set va up
ip neigh replace 10.7.0.2 lladdr 02:00:00:00:07:02 dev va
ip route replace 10.7.0.2 dev va src 10.7.0.1 table 101
