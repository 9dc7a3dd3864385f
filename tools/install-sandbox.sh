#!/usr/bin/env bash
# Installs bubblewrap, the sandbox in which candidates are built and run, where this user may install packages.
# Never fails the set-up: without it the gates that need it say not_evaluated, and `fasttrack doctor` says how to get it.
set -u
command -v bwrap >/dev/null && exit 0
if [ "$(id -u)" = 0 ]; then sudo=""; elif sudo -n true 2>/dev/null; then sudo="sudo -n"; else sudo=none; fi
if [ "$sudo" != none ] && command -v apt-get >/dev/null; then
  $sudo apt-get update -qq >/dev/null 2>&1
  $sudo apt-get install -y -qq bubblewrap >/dev/null 2>&1
fi
command -v bwrap >/dev/null || echo "bubblewrap is missing: gates that run candidate code will be not_evaluated; next: apt-get install bubblewrap" >&2
exit 0
