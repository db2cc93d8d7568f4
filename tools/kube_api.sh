#!/bin/sh
# Builds what tests/integration/test_kube.py asks: kube-apiserver and kube-controller-manager 1.20 of Debian 12's source
# package, and its etcd. It takes no rights but to write to its folder, 4 GB there, the network, and a quarter of an hour.
#
#   sh tools/kube_api.sh [FOLDER]      FOLDER: what KUBE_PROGRAMS says, or ~/.cache/unfuse-kube
#
# It goes on where it was ended. Programs are in FOLDER/bin. What is downloaded is checked by apt against Debian's keys.
set -eu
folder=${1:-${KUBE_PROGRAMS:-${XDG_CACHE_HOME:-$HOME/.cache}/unfuse-kube}}
mkdir -p "$folder/bin" "$folder/debs" "$folder/apt/lists/partial" "$folder/apt/cache/archives/partial" "$folder/apt/sources.d"
cd "$folder"
folder=$PWD

step() { # a step with this name is done once
    name=$1
    shift
    [ -e "done.$name" ] || { echo "== $name"; "$@"; touch "done.$name"; }
}

apt() {
    apt-get -q -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$folder/apt/sources.d" \
        -o Dir::State::lists="$folder/apt/lists" -o Dir::Cache="$folder/apt/cache" -o APT::Sandbox::User= "$@"
}

download() {
    for suite in 'debian bookworm' 'debian-security bookworm-security'; do
        echo "Types: deb deb-src
URIs: http://deb.debian.org/${suite% *}
Suites: ${suite#* }
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"
    done >apt/sources.d/debian.sources
    apt update
    cd debs
    apt download golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev etcd-server
    apt --download-only --only-source source kubernetes
    cd ..
}

unpack() {
    rm -rf root go
    mkdir -p root go/src/k8s.io
    for one in debs/*.deb; do dpkg-deb -x "$one" root; done
    dpkg-source --no-check -x debs/kubernetes_*.dsc go/src/k8s.io/kubernetes
    cp root/usr/bin/etcd bin/
    # the one that comes with it ends the server at the first custom resource, built by a Go that is newer than it
    vendored=go/src/k8s.io/kubernetes/vendor/github.com/modern-go/reflect2
    rm -rf "$vendored"
    cp -r root/usr/share/gocode/src/github.com/modern-go/reflect2 "$vendored"
}

go() {
    (cd "$folder/go/src/k8s.io/kubernetes" && env GOROOT="$folder/root/usr/lib/go-1.19" GOPATH="$folder/go" \
        GOCACHE="$folder/go-cache" GO111MODULE=off GOFLAGS= CGO_ENABLED=0 PATH="$folder/root/usr/lib/go-1.19/bin:$PATH" "$@")
}

describe() { # what types look like, for server-side apply: no part of the source package
    go go build -o "$folder/bin/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
    inputs=$(go grep -rl --include='*.go' '+k8s:openapi-gen=' staging/src/k8s.io pkg cmd plugin |
        grep -v -e /code-generator/ -e /sample- -e /testdata/ -e /zz_generated -e _test.go | xargs -n1 dirname | sort -u |
        sed 's,^staging/src/,vendor/,;s,^,k8s.io/kubernetes/,' | paste -sd, -)
    go "$folder/bin/openapi-gen" --logtostderr -O zz_generated.openapi -h hack/boilerplate/boilerplate.generatego.txt \
        -i "$inputs" -p k8s.io/kubernetes/pkg/generated/openapi -r "$folder/violations"
}

build() {
    go go build -trimpath -o "$folder/bin/$1" "./cmd/$1"
}

step download download
step unpack unpack
step describe describe
step kube-apiserver build kube-apiserver
step kube-controller-manager build kube-controller-manager
rm -rf go go-cache root
echo "built in $folder/bin"
