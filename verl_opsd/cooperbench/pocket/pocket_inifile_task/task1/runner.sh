#!/bin/bash
# Runs one feature's hidden tests: runner.sh TESTS_PATCH [FEATURE_PATCH], both names of files in /patches.
# CooperBench's semantics: reset, clean, apply the feature, apply the tests, run a fixed command; its exit status is the result.
# A feature patch never decides how tests run: what it changes in test files, in the configuration of pytest, in modules that
# would shadow pytest or the interpreter's start-up, or in package metadata (it names plugins) is set back to the base tree, and each such path is printed.
set -e
export GIT_LITERAL_PATHSPECS=1
cd /workspace/repo

reset_tree() {
    rm -f .git/index.lock
    git reset -q --hard HEAD
    git clean -qfdx
}
trap reset_tree EXIT
reset_tree

apply_patch() {
    git apply --ignore-whitespace --ignore-space-change "/patches/$1" || git apply --3way "/patches/$1"
}

guarded='(^|/)(tests?|__tests__|testdata)(/|$)|(^|/)(test_[^/]*|[^/]*_test|tests?|conftest)\.py$'
guarded+='|(^|/)(\.?pytest\.(ini|toml)|tox\.ini|setup\.cfg|pyproject\.toml)$'
guarded+='|^(src/)?(sitecustomize|usercustomize|_?pytest|pluggy|iniconfig)([./]|$)'
guarded+='|(^|/)[^/]*\.(dist-info|egg-info)(/|$)'

if [[ -n "$2" ]]; then
    apply_patch "$2"
    git add -A -f
    while IFS= read -r -d '' path; do
        if [[ "$path" != *$'\n'* ]] && ! grep -qiE "$guarded" <<<"$path"; then continue; fi
        printf 'set back to the base tree: %q\n' "$path"
        if git cat-file -e "HEAD:$path" 2>/dev/null; then
            git reset -q -- "$path"
            git checkout -q -- "$path"
        else
            git rm -q -r -f --cached -- "$path"
            rm -rf -- "$path"
        fi
    done < <(git diff --cached --no-renames --name-only -z HEAD)
fi
apply_patch "$1"

python -m pytest tests -v -p no:cacheprovider
