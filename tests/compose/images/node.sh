# /keys has the host key of this node and the public key that may log in.
set -eu
install -d -o train -m 700 ~train/.ssh
install -o train -m 600 /keys/id.pub ~train/.ssh/authorized_keys
install -m 600 "/keys/$(hostname)" /etc/ssh/host_key
install -d /run/sshd
exec /usr/sbin/sshd -D -e -h /etc/ssh/host_key
