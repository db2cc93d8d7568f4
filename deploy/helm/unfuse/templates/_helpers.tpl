{{- define "unfuse.fullname" -}}
{{- $name := .Values.fullnameOverride | default .Release.Name | replace "." "-" -}}
{{- if le (len $name) 30 -}}{{ $name }}{{- else -}}
{{- printf "%s-%s" (trunc 21 $name | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- end -}}
{{- end -}}

{{/* The name of a DiffusionPool, for (list root pool). */}}
{{- define "unfuse.pool" -}}
{{- $name := printf "%s-%s" (include "unfuse.fullname" (first .)) (last .).name -}}
{{- if le (len $name) 40 -}}{{ $name }}{{- else -}}
{{- printf "%s-%s" (trunc 31 $name | trimSuffix "-") (sha256sum $name | trunc 8) -}}
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

{{- define "unfuse.image" -}}
{{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
{{- end -}}

{{/* Whether the trial Redis is used: "" if another queue is set. */}}
{{- define "unfuse.trialRedis" -}}
{{- $scheduler := .Values.pipeline.scheduler -}}
{{- if not (or $scheduler.queue $scheduler.redis (ne ($scheduler.queueBackend | default "redis") "redis")) -}}yes{{- end -}}
{{- end -}}

{{/* Where results are stored: pipeline (as set there), claim or redis. */}}
{{- define "unfuse.resultsIn" -}}
{{- $results := .Values.pipeline.results | default dict -}}
{{- if or $results.url $results.claim -}}
pipeline
{{- else if or .Values.results.size (not (include "unfuse.trialRedis" .)) -}}
claim
{{- else -}}
redis
{{- end -}}
{{- end -}}

{{- define "unfuse.apiSecret" -}}
{{ .Values.pipeline.apiKeysSecret | default (printf "%s-api" (include "unfuse.fullname" .)) | quote }}
{{- end -}}

{{- define "unfuse.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "unfuse.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
