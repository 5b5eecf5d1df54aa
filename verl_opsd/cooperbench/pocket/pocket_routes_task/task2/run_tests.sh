#!/bin/bash
# Runs the tests of the tree in DIRECTORY: run_tests.sh DIRECTORY
set -e
cd "$1"
PYTHONPATH="$PWD/src:$PWD" python -m pytest tests -v -p no:cacheprovider
