{{- define "unfuse.fullname" -}}
{{- $name := .Values.fullnameOverride | default .Release.Name | replace "." "-" -}}
{{- if le (len $name) 30 -}}{{ $name }}{{- else -}}
{{- printf "%s-%s" (trunc 21 $name | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- end -}}
{{- end -}}

{{- define "unfuse.selector" -}}
app.kubernetes.io/name: unfuse
app.kubernetes.io/instance: {{ include "unfuse.fullname" . | quote }}
{{- end -}}

{{- define "unfuse.labels" -}}
{{ include "unfuse.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end -}}

{{- define "unfuse.operatorSelector" -}}
app.kubernetes.io/name: unfuse-operator
app.kubernetes.io/instance: {{ include "unfuse.fullname" . | quote }}
{{- end -}}

{{- define "unfuse.operatorLabels" -}}
{{ include "unfuse.operatorSelector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end -}}

{{- define "unfuse.image" -}}
{{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
{{- end -}}

{{- define "unfuse.account" -}}
{{ .Values.serviceAccount.name | default (include "unfuse.fullname" .) | quote }}
{{- end -}}

{{- define "unfuse.wireSecret" -}}
{{ .Values.wireKeys.existingSecret | default (printf "%s-wire" (include "unfuse.fullname" .)) | quote }}
{{- end -}}

{{/* The file in that Secret by which a side, for (dict "root" root "side" side), knows the other one. */}}
{{- define "unfuse.wireKey" -}}
{{- if or .root.Values.wireKeys.existingSecret .root.Values.wireKeys.scheduler -}}
{{ printf "%s.key" .side }}
{{- else -}}
shared.key
{{- end -}}
{{- end -}}

{{/* Whether the Redis for trying is used: "" where tasks wait elsewhere. */}}
{{- define "unfuse.trialRedis" -}}
{{- if not (or .Values.queue.url .Values.queue.existingSecret) -}}yes{{- end -}}
{{- end -}}

{{/* Where results are: s3, claim or redis. */}}
{{- define "unfuse.resultsIn" -}}
{{- if .Values.results.url -}}
s3
{{- else if or .Values.results.existingClaim .Values.results.size (not (include "unfuse.trialRedis" .)) -}}
claim
{{- else -}}
redis
{{- end -}}
{{- end -}}

{{- define "unfuse.apiSecret" -}}
{{ .Values.apiKeys.existingSecret | default (printf "%s-api" (include "unfuse.fullname" .)) | quote }}
{{- end -}}

{{- define "unfuse.resultsClaim" -}}
{{ .Values.results.existingClaim | default (printf "%s-results" (include "unfuse.fullname" .)) | quote }}
{{- end -}}

{{/* What does not go together is said before anything is made. */}}
{{- define "unfuse.check" -}}
{{- if not (regexMatch "^[a-z]" (include "unfuse.fullname" .)) -}}
{{- fail (printf "a Service's name begins with a letter, and %s does not: set fullnameOverride" .Release.Name) -}}
{{- end -}}
{{- if and .Values.queue.url .Values.queue.existingSecret -}}
{{- fail "where tasks wait is said once: set either queue.url or queue.existingSecret" -}}
{{- end -}}
{{- if not (or .Values.queue.url .Values.queue.existingSecret .Values.redis.trial) -}}
{{- fail "tasks have no place to wait: set queue.url or queue.existingSecret, or redis.trial to true" -}}
{{- end -}}
{{- if ne (empty .Values.wireKeys.scheduler) (empty .Values.wireKeys.worker) -}}
{{- fail "schedulers and workers need keys that fit: `unfuse keys new keys`, then --set-file wireKeys.scheduler=keys/scheduler.key --set-file wireKeys.worker=keys/worker.key, or a Secret with both files as wireKeys.existingSecret" -}}
{{- end -}}
{{- if and .Values.componentSources (gt (len .Values.models) 1) -}}
{{- fail "componentSources are of one model: install the others as another release" -}}
{{- end -}}
{{- $names := list -}}
{{- range .Values.workers -}}
{{- if has .name $names -}}{{- fail (printf "two pools are named %s" .name) -}}{{- end -}}
{{- if has .name (list "scheduler" "redis") -}}{{- fail (printf "no pool may be named %s" .name) -}}{{- end -}}
{{- $names = append $names .name -}}
{{- with .autoscaling -}}
{{- if eq (hasKey . "seconds") (hasKey . "tasks") -}}
{{- fail "autoscaling needs one of seconds (predicted work for each worker) and tasks (waiting tasks for each worker)" -}}
{{- end -}}
{{- if and .query (eq $.Values.autoscaling.by "hpa") -}}{{- fail "autoscaling.query is for KEDA: an HPA has no query" -}}{{- end -}}
{{- if lt (int .max) (int .min) -}}{{- fail "autoscaling.max is below autoscaling.min" -}}{{- end -}}
{{- if and (eq $.Values.autoscaling.by "hpa") (lt (int .min) 1) -}}
{{- fail "an HPA keeps at least one worker: set autoscaling.min to 1, or autoscaling.by to keda" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether something here scales a pool, for (list root pool): "" where that takes KEDA, and the cluster has none. */}}
{{- define "unfuse.scaled" -}}
{{- $root := first . -}}
{{- if and (last .).autoscaling (or (eq $root.Values.autoscaling.by "hpa") ($root.Capabilities.APIVersions.Has "keda.sh/v1alpha1")) -}}
yes
{{- end -}}
{{- end -}}

{{/* The seconds from scaling a pool up to its worker's first task, for (pool). */}}
{{- define "unfuse.coldStart" -}}
{{ .autoscaling.coldStartSeconds | default 300 }}
{{- end -}}

{{/* The seconds that a pool's running work gets, for (pool): a step that runs ends within a quarter of them, which is
what is kept for saving. */}}
{{- define "unfuse.drain" -}}
{{ max (int (.drainSeconds | default 20)) (int (mulf 4 (.stepSeconds | default 2) | ceil)) }}
{{- end -}}

{{/* How a pool's stages are spread over ranks, for (pool): what it says, or as many ranks as a pod has GPUs where it has
several and no flag says otherwise. */}}
{{- define "unfuse.parallel" -}}
{{- $gpus := 0 -}}
{{- range $name, $amount := merge (dict) (dig "limits" (dict) (.resources | default dict)) (dig "requests" (dict) (.resources | default dict)) -}}
{{- if regexMatch "^(nvidia|amd)[.]com/gpu$|^gpu[.]intel[.]com/(i915|xe)$" $name -}}
{{- $gpus = add $gpus (int $amount) -}}
{{- end -}}
{{- end -}}
{{- $said := false -}}
{{- range .args -}}
{{- if regexMatch "^--(parallel|device)(=|$)" . -}}{{- $said = true -}}{{- end -}}
{{- end -}}
{{- if .parallel -}}
{{ .parallel }}
{{- else if and (gt (int $gpus) 1) (not $said) -}}
auto
{{- end -}}
{{- end -}}

{{/* The roles whose stages a pool's workers run, as a pattern of the metric's label, for (pool). */}}
{{- define "unfuse.roles" -}}
{{- $roles := splitList "+" (replace "," "+" .role) -}}
{{- if has "all" $roles }}.+{{ else -}}
{{- $each := list -}}
{{- range $roles -}}
{{- $each = concat $each (ternary (list "prefill" "decode") (list .) (eq . "language")) -}}
{{- end -}}
{{- join "|" $each -}}
{{- end -}}
{{- end -}}

{{/* Resources with amounts as words, which a server that is to apply numbers refuses, for (resources). */}}
{{- define "unfuse.resources" -}}
{{- $all := deepCopy (. | default dict) -}}
{{- range $part := list "limits" "requests" -}}
{{- range $name, $amount := get $all $part | default dict -}}
{{- $whole := and (kindIs "float64" $amount) (eq $amount (floor $amount)) -}}
{{- $_ := set (get $all $part) $name (ternary (printf "%.0f" (float64 $amount)) (toString $amount) $whole) -}}
{{- end -}}
{{- end -}}
{{ toYaml $all }}
{{- end -}}

{{- define "unfuse.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ int64 .Values.uid }}
runAsGroup: {{ int64 .Values.uid }}
fsGroup: {{ int64 .Values.uid }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "unfuse.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Secrets are mounted for the group of a pod to read, and keys that others can read are refused: a copy is its own. */}}
{{- define "unfuse.keysContainer" -}}
- name: keys
  image: {{ include "unfuse.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [install, -m, "600", {{ printf "/wire/%s" (include "unfuse.wireKey" .) | quote }}, /keys/]
  securityContext: {{- include "unfuse.containerSecurity" . | nindent 4 }}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  volumeMounts:
    - {name: wire, mountPath: /wire, readOnly: true}
    - {name: keys, mountPath: /keys}
{{- end -}}

{{- define "unfuse.volumes" -}}
- name: wire
  secret:
    secretName: {{ include "unfuse.wireSecret" .root }}
    items: [{key: {{ include "unfuse.wireKey" . | quote }}, path: {{ include "unfuse.wireKey" . | quote }}}]
- name: keys
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
- name: run
  emptyDir: {}
- name: tmp
  emptyDir: {}
- name: data
  emptyDir: {}
- name: models
{{- if .root.Values.modelCache.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .root.Values.modelCache.existingClaim | quote }}}
{{- else }}
  emptyDir: {sizeLimit: {{ .root.Values.modelCache.sizeLimit | quote }}}
{{- end }}
{{- if eq (include "unfuse.resultsIn" .root) "claim" }}
- name: results
  persistentVolumeClaim: {claimName: {{ include "unfuse.resultsClaim" .root }}}
{{- end }}
{{- end -}}

{{- define "unfuse.mounts" -}}
- {name: keys, mountPath: /keys, readOnly: true}
- {name: run, mountPath: /run/unfuse}
- {name: tmp, mountPath: /tmp}
- {name: data, mountPath: /data}
- {name: models, mountPath: /models}
{{- if eq (include "unfuse.resultsIn" .) "claim" }}
- {name: results, mountPath: /results}
{{- end }}
{{- end -}}

{{- define "unfuse.hubToken" -}}
{{- with .Values.modelCache.hubSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: token}}
{{- end }}
{{- end -}}
