{{/* NOT RUN on a cluster; see Chart.yaml. */}}

{{/* Short enough that "-prefill", and the hash that a StatefulSet adds in its labels, still fit in 63. */}}
{{- define "pdoffload.name" -}}
{{- if contains "pdoffload" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-pdoffload" (.Release.Name | trunc 30 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{/* What the pods of both roles have in common, and no other release has. */}}
{{- define "pdoffload.selector" -}}
app.kubernetes.io/name: pdoffload
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "pdoffload.labels" -}}
{{ include "pdoffload.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "pdoffload.image" -}}
{{- required "image.repository: required; the image built from deploy/Dockerfile" .Values.image.repository -}}
:{{ .Values.image.tag }}
{{- end -}}

{{- define "pdoffload.secretName" -}}
{{- with .Values.clusterSecret -}}
{{- if and .existingSecret .value -}}
{{- fail "clusterSecret: existingSecret and value are both set; give one of them" -}}
{{- else if .existingSecret -}}
{{- .existingSecret -}}
{{- else if not .value -}}
{{- fail "clusterSecret: required; set existingSecret to the name of a Secret, or value" -}}
{{- else if lt (len .value) 16 -}}
{{- fail "clusterSecret.value: at least 16 characters are needed; try: openssl rand -base64 32" -}}
{{- else -}}
{{- include "pdoffload.name" $ -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The same for both roles: what an engine does for a request stands in the request. */}}
{{- define "pdoffload.transferConfig" -}}
{{- $tier := dict
  "type" "p2p"
  "port" (int64 .Values.p2p.port)
  "num_threads" (int64 .Values.p2p.numThreads)
  "unbound_store_timeout_s" .Values.p2p.unboundStoreTimeoutSeconds
  "cluster_secret_file" "/etc/pdoffload/cluster-secret" -}}
{{- $extra := dict
  "spec_name" "NixlTieringOffloadingSpec"
  "cpu_bytes_to_use" (mul .Values.kvCache.hostMemoryGiB 1073741824)
  "verify" .Values.kvCache.verify
  "secondary_tiers" (list $tier) -}}
{{- dict
  "kv_connector" "PdOffloadConnector"
  "kv_connector_module_path" "pdoffload.vllm"
  "kv_role" "kv_both"
  "kv_load_failure_policy" "recompute"
  "kv_connector_extra_config" $extra | toJson -}}
{{- end -}}
