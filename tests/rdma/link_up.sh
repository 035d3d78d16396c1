# Bring the interfaces back, with all that the kernel forgets of interfaces that go down.
set -eu
ip link set va up
ip link set vb up
ip neigh replace 10.7.0.2 lladdr 02:00:00:00:07:02 dev va
ip neigh replace 10.7.0.1 lladdr 02:00:00:00:07:01 dev vb
ip route replace 10.7.0.2 dev va src 10.7.0.1 table 101
ip route replace 10.7.0.1 dev vb src 10.7.0.2 table 102
