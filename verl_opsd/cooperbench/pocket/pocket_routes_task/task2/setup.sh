#!/bin/bash
# Makes the base tree a git repository: setup.sh DIRECTORY
set -e
cp -r "$(dirname "$0")/base/." "$1"
cd "$1"
git init -q -b main
git add -A -f
git -c user.name=base -c user.email=base@localhost commit -q -m "Base tree"
