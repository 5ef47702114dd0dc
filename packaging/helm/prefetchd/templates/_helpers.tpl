{{- define "prefetchd.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "prefetchd.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "prefetchd.labels" -}}
{{ include "prefetchd.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "prefetchd.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "prefetchd.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "prefetchd.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}

{{- define "prefetchd.scheme" -}}
{{- if .Values.tls.secretName -}}https{{- else -}}http{{- end -}}
{{- end -}}

{{/* The configuration with what the chart itself decides: where the mounted secrets are. */}}
{{- define "prefetchd.config" -}}
{{- $metrics := deepCopy (default dict .Values.config.metrics) -}}
{{- if .Values.tls.secretName -}}
{{- $_ := set $metrics "certificate" "/etc/prefetchd-tls/tls.crt" -}}
{{- $_ := set $metrics "key" "/etc/prefetchd-tls/tls.key" -}}
{{- if .Values.tls.requireClientCertificate -}}
{{- $_ := set $metrics "client_ca" "/etc/prefetchd-tls/ca.crt" -}}
{{- end -}}
{{- end -}}
{{- if .Values.basicAuth.secretName -}}
{{- $_ := set $metrics "basic_auth_file" "/etc/prefetchd-auth/users" -}}
{{- end -}}
{{- $config := deepCopy .Values.config -}}
{{- if $metrics -}}
{{- $_ := set $config "metrics" $metrics -}}
{{- end -}}
{{- include "prefetchd.toml" (dict "path" "" "table" $config) -}}
{{- end -}}

{{/* TOML of a mapping. Helm's own toToml writes whole numbers as floats, which a count does not accept. */}}
{{- define "prefetchd.toml" -}}
{{- $path := .path -}}
{{- range $key, $value := .table -}}
{{- if not (or (kindIs "map" $value) (kindIs "invalid" $value) (include "prefetchd.tableList" $value)) }}
{{ $key }} = {{ include "prefetchd.tomlValue" $value }}
{{- end -}}
{{- end -}}
{{- range $key, $value := .table -}}
{{- $name := ternary $key (printf "%s.%s" $path $key) (eq $path "") -}}
{{- if kindIs "map" $value }}

[{{ $name }}]
{{- include "prefetchd.toml" (dict "path" $name "table" $value) -}}
{{- else if include "prefetchd.tableList" $value -}}
{{- range $item := $value }}

[[{{ $name }}]]
{{- include "prefetchd.toml" (dict "path" $name "table" $item) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Not empty for a list whose first item is a mapping. */}}
{{- define "prefetchd.tableList" -}}
{{- if kindIs "slice" . -}}{{- if . -}}{{- if kindIs "map" (first .) -}}yes{{- end -}}{{- end -}}{{- end -}}
{{- end -}}

{{- define "prefetchd.tomlValue" -}}
{{- if kindIs "string" . -}}
{{ toJson . }}
{{- else if kindIs "bool" . -}}
{{ . }}
{{- else if kindIs "slice" . -}}
[{{- range $index, $item := . -}}{{- if $index }}, {{ end -}}{{- include "prefetchd.tomlValue" $item -}}{{- end -}}]
{{- else if eq (float64 .) (floor .) -}}
{{ int64 . }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end -}}

{{/* How the kubelet asks. It has no client certificate, so where one is required it only sees whether the port is open. */}}
{{- define "prefetchd.probe" -}}
{{- if eq .kind "tcpSocket" -}}
tcpSocket:
  port: metrics
{{- else -}}
httpGet:
  path: {{ .path }}
  port: metrics
  scheme: {{ include "prefetchd.scheme" .root | upper }}
{{- end -}}
{{- end -}}

{{/* Scrape settings that ServiceMonitor and PodMonitor share; `job` stays the training job, `instance` is the node. */}}
{{- define "prefetchd.scrape" -}}
{{- $monitor := index .root.Values .monitor -}}
{{- $tls := default dict $monitor.tlsConfig -}}
{{- if and .root.Values.basicAuth.secretName (not $monitor.basicAuth) }}{{ fail (printf "%s.enabled with basicAuth.secretName needs %s.basicAuth, the user and password to scrape with." .monitor .monitor) }}{{ end }}
{{- if and .root.Values.tls.requireClientCertificate (not $tls.cert) }}{{ fail (printf "%s.enabled with tls.requireClientCertificate needs %s.tlsConfig.cert and keySecret, the certificate to scrape with." .monitor .monitor) }}{{ end -}}
port: metrics
path: /metrics
interval: {{ $monitor.interval }}
honorLabels: true
scheme: {{ include "prefetchd.scheme" .root }}
{{- if .root.Values.tls.secretName }}
tlsConfig:
  {{- toYaml (default (dict "insecureSkipVerify" true) $monitor.tlsConfig) | nindent 2 }}
{{- end }}
{{- with $monitor.basicAuth }}
basicAuth:
  {{- toYaml . | nindent 2 }}
{{- end }}
relabelings:
  - sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: instance
  - targetLabel: job
    replacement: prefetchd
{{- end -}}
