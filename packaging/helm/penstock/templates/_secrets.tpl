{{/* Sources of the projected volume with everything secret that the config names. */}}
{{- define "penstock.secrets" -}}
{{- $sources := list -}}
{{- with .Values.store.postgres -}}
{{- if and .url .passwordSecret.name -}}
{{- $sources = append $sources (dict "name" .passwordSecret.name "key" .passwordSecret.key "path" "store-password") -}}
{{- end -}}
{{- if and .url .caSecret -}}
{{- $sources = append $sources (dict "name" .caSecret "key" "ca.crt" "path" "store-ca.crt") -}}
{{- end -}}
{{- end -}}
{{- with .Values.counters.redis -}}
{{- if and .url .passwordSecret.name -}}
{{- $sources = append $sources (dict "name" .passwordSecret.name "key" .passwordSecret.key "path" "counters-password") -}}
{{- end -}}
{{- if and .url .caSecret -}}
{{- $sources = append $sources (dict "name" .caSecret "key" "ca.crt" "path" "counters-ca.crt") -}}
{{- end -}}
{{- end -}}
{{- with .Values.pepper.secret -}}
{{- if .name -}}{{- $sources = append $sources (dict "name" .name "key" .key "path" "pepper") -}}{{- end -}}
{{- end -}}
{{- with .Values.metrics.keySecret -}}
{{- if .name -}}{{- $sources = append $sources (dict "name" .name "key" .key "path" "metrics-key") -}}{{- end -}}
{{- end -}}
{{- range .Values.pools -}}
{{- $sources = append $sources (dict "name" .keySecret.name "key" .keySecret.key "path" (printf "pool-%s" .id)) -}}
{{- end -}}
{{- range $sources }}
- secret:
    name: {{ .name }}
    items: [{ key: {{ .key }}, path: {{ .path }} }]
{{- else }}
[]
{{- end -}}
{{- end -}}
