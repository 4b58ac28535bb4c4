#!/bin/sh
# Makes a small Debian image with debootstrap where no image registry can be reached.
# usage: docker/stand-ins/debian.sh SUITE TAG     (root; DOCKER_HOST names the engine)
# The image trusts the certificate authorities of this machine and uses its apt mirror and pip index,
# so that builds on top of it work wherever this machine does.
set -eu
suite=$1
tag=$2
mirror=$("${PYTHON:-python3}" -c 'import sys; sys.path.insert(0, "tools"); import docker_engine; print(docker_engine.debian_mirror())')
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT INT TERM
# Older debootstraps lack scripts of newer suites; all of them are links to the same one.
[ -e "/usr/share/debootstrap/scripts/$suite" ] || ln -s sid "/usr/share/debootstrap/scripts/$suite"
if ! debootstrap --variant=minbase --include=ca-certificates "$suite" "$tree" "$mirror" >"$tree.log" 2>&1; then
  tail -n 20 "$tree.log" >&2
  rm -f "$tree.log"
  exit 1
fi
rm -f "$tree.log"
mkdir -p "$tree/usr/local/share/ca-certificates"
for certificate in /usr/local/share/ca-certificates/*.crt; do
  [ ! -e "$certificate" ] || cp -L "$certificate" "$tree/usr/local/share/ca-certificates/"
done
chroot "$tree" update-ca-certificates >/dev/null 2>&1
{
  printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n'
  [ -z "${PIP_INDEX_URL:-}" ] || printf 'index-url = %s\n' "$PIP_INDEX_URL"
} >"$tree/etc/pip.conf"
rm -rf "$tree"/var/cache/apt/archives/*.deb "$tree"/var/lib/apt/lists/* "$tree"/usr/share/doc/* \
  "$tree"/usr/share/man/* "$tree"/usr/share/locale/*
tar -C "$tree" --numeric-owner -cf - . | docker import --change 'CMD ["bash"]' - "$tag" >/dev/null
echo "made $tag"
