{{/* Names */}}
{{- define "pocketllm.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "pocketllm.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Labels of a resource; call with (list . "component"). */}}
{{- define "pocketllm.labels" -}}
{{- $root := index . 0 -}}
{{ include "pocketllm.selector" $root }}
app.kubernetes.io/component: {{ index . 1 }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "pocketllm.podSelector" -}}
{{ include "pocketllm.selector" (index . 0) }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* A reference; call with (list . .Values.image). */}}
{{- define "pocketllm.image" -}}
{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default (index . 0).Chart.AppVersion $image.tag }}
{{- end -}}
{{- end -}}

{{- define "pocketllm.serviceAccount" -}}
{{- if .Values.serviceAccount.name -}}
{{ .Values.serviceAccount.name }}
{{- else if .Values.serviceAccount.create -}}
{{ include "pocketllm.fullname" . }}
{{- else -}}
default
{{- end -}}
{{- end -}}

{{- define "pocketllm.authSecret" -}}
{{ default (printf "%s-gateway" (include "pocketllm.fullname" .)) .Values.auth.existingSecret }}
{{- end -}}

{{/* Security: every pod and every container, whoever's image it runs. */}}
{{- define "pocketllm.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.runAsUser }}
runAsGroup: {{ .Values.podSecurity.runAsGroup }}
fsGroup: {{ .Values.podSecurity.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "pocketllm.containerSecurity" -}}
runAsNonRoot: true
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Spread over nodes and zones; call with (list . "component" "ScheduleAnyway"). */}}
{{- define "pocketllm.spread" -}}
{{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
- maxSkew: 1
  topologyKey: {{ $key }}
  whenUnsatisfiable: {{ index $ 2 }}
  labelSelector:
    matchLabels:
      {{- include "pocketllm.podSelector" (list (index $ 0) (index $ 1)) | nindent 6 }}
{{- end }}
{{- end -}}

{{/* Seconds until SIGKILL: what a drain may take, and then some. Call with (dict "values" ... "name" ... "after" ...). */}}
{{- define "pocketllm.grace" -}}
{{- $needed := add .values.preStopSeconds .values.drainSeconds .after -}}
{{- $given := .values.terminationGracePeriodSeconds -}}
{{- if and (not (kindIs "invalid" $given)) (lt (int $given) (int $needed)) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds: got %d; preStopSeconds and drainSeconds need at least %d" .name (int $given) (int $needed)) -}}
{{- end -}}
{{- if kindIs "invalid" $given }}{{ $needed }}{{ else }}{{ int $given }}{{ end -}}
{{- end -}}

{{/* Values that contradict each other are refused here, by name. */}}
{{- define "pocketllm.validate" -}}
{{- $model := .Values.model -}}
{{- if not $model.path -}}
{{- fail "model.path: must be set" -}}
{{- end -}}
{{- if and (ne $model.source "bundled") (not (hasPrefix "/models/" $model.path)) -}}
{{- fail (printf "model.path: got %q; with model.source %s it must be below /models/" $model.path $model.source) -}}
{{- end -}}
{{- if and (eq $model.source "pvc") (not $model.pvc.claimName) -}}
{{- fail "model.pvc.claimName: must name a claim when model.source is pvc" -}}
{{- end -}}
{{- if and (eq $model.source "image") (not $model.image.reference) -}}
{{- fail "model.image.reference: must name an image when model.source is image" -}}
{{- end -}}
{{- if and (eq $model.source "init") (not $model.init.image) -}}
{{- fail "model.init.image: must name an image when model.source is init" -}}
{{- end -}}
{{- if .Values.gateway.enabled -}}
{{- $auth := .Values.auth -}}
{{- if $auth.enabled -}}
{{- if and (not $auth.existingSecret) (not $auth.entries) -}}
{{- fail "auth: set existingSecret, or entries made by `python -m pocket_client.gateway --hash-key TENANT`; auth.enabled=false lets everybody in" -}}
{{- end -}}
{{- if and (not $auth.existingSecret) (not $auth.cacheSecret) -}}
{{- fail "auth.cacheSecret: gateways need one in common, 16 characters or more, to share cached prefixes" -}}
{{- end -}}
{{- else if .Values.ingress.enabled -}}
{{- fail "ingress.enabled: refused while auth.enabled is false, since everybody could use the model" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) -}}
{{- fail "ingress.host: must be set" -}}
{{- end -}}
{{- else if .Values.ingress.enabled -}}
{{- fail "ingress.enabled: the Ingress is the gateway's, and gateway.enabled is false" -}}
{{- end -}}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas: got %d; must be at most maxReplicas (%d)" (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- end -}}
