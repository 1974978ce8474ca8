{{- define "penstock.fullname" -}}
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

{{- define "penstock.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "penstock.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "penstock.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{- define "penstock.serviceAccount" -}}
{{ default (include "penstock.fullname" .) .Values.serviceAccount.name }}
{{- end -}}

{{/* Security of every pod and container: no root, no capability, nothing to write but what is mounted. */}}
{{- define "penstock.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "penstock.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end -}}

{{/* Yes where there can be more than one gateway. */}}
{{- define "penstock.several" -}}
{{- if or (gt (int .Values.gateway.replicas) 1) (and .Values.gateway.autoscaling.enabled (gt (int .Values.gateway.autoscaling.max) 1)) -}}yes{{- end -}}
{{- end -}}

{{/* Yes where a pool lets its gateway scale the workers. */}}
{{- define "penstock.scales" -}}
{{- range .Values.pools -}}{{- if .autoscale -}}yes{{- end -}}{{- end -}}
{{- end -}}

{{/* Name of a pool's workers of one role: of the StatefulSet and its headless service. */}}
{{- define "penstock.workers" -}}
{{ include "penstock.fullname" .root }}-{{ .pool.id }}-{{ .role }}
{{- end -}}

{{/* Refuses values that cannot work together. */}}
{{- define "penstock.check" -}}
{{- $v := .Values -}}
{{- if include "penstock.several" . -}}
{{- if not $v.store.postgres.url -}}{{- fail "several gateways share keys and the ledger: set store.postgres.url, or gateway.replicas to 1" -}}{{- end -}}
{{- if not $v.pepper.secret.name -}}{{- fail "several gateways need one secret for the digests of keys: set pepper.secret.name" -}}{{- end -}}
{{- if $v.gateway.stateClaim -}}{{- fail "gateway.stateClaim is for one gateway: several have a state folder each" -}}{{- end -}}
{{- if include "penstock.scales" . -}}{{- fail "pools[].autoscale is for one gateway: several would each scale the workers (use an autoscaler of the cluster for the StatefulSet)" -}}{{- end -}}
{{- end -}}
{{- with $v.gateway.autoscaling -}}
{{- if and .enabled (gt (int .min) (int .max)) -}}{{- fail "gateway.autoscaling.min is above gateway.autoscaling.max" -}}{{- end -}}
{{- end -}}
{{- if eq $v.gateway.tls.clientAuth "required" -}}{{- fail "gateway.tls.clientAuth: required keeps the probes of the cluster out, which have no certificates: set optional, and ask for certificates by keys" -}}{{- end -}}
{{- if and (eq $v.endpointPicker.tls.clientAuth "required") (not $v.endpointPicker.tls.secretName) -}}{{- fail "endpointPicker.tls.clientAuth: required needs endpointPicker.tls.secretName" -}}{{- end -}}
{{- $ids := list -}}
{{- range $v.pools -}}
{{- if has .id $ids -}}{{- fail (printf "two pools have the id %s" .id) -}}{{- end -}}
{{- $ids = append $ids .id -}}
{{- $sum := 0 -}}
{{- range $role, $set := (.workers | default dict) -}}{{- $sum = add $sum (int $set.replicas) -}}{{- end -}}
{{- if .autoscale -}}
{{- if .workers -}}{{- fail (printf "pool %s: autoscale has min and max instead of workers" .id) -}}{{- end -}}
{{- if gt (int .autoscale.min) (int .autoscale.max) -}}{{- fail (printf "pool %s: autoscale.min is above autoscale.max" .id) -}}{{- end -}}
{{- else if lt (int $sum) 1 -}}{{- fail (printf "pool %s has no workers" .id) -}}{{- end -}}
{{- $id := .id -}}
{{- range $key, $_ := (.config | default dict) -}}
{{- if has $key (list "workers" "threads" "device" "quantize" "kv_format" "path" "context_tokens" "kv_bytes_max" "gpu_memory_share" "sequences_max" "prompt_lookup" "shared_weights" "kv_host_bytes" "kv_disk_path" "kv_disk_bytes" "kv_remote" "kv_remote_password_file" "on_demand") -}}
{{- fail (printf "pool %s: config.%s is for workers that a gateway starts; for workers of the chart, put the option of penstock worker into pools[].args" $id $key) -}}
{{- end -}}
{{- end -}}
{{- if and .model (not .volume) -}}{{- fail (printf "pool %s: a model needs the volume that it is in" .id) -}}{{- end -}}
{{- end -}}
{{- if and $v.metrics.serviceMonitor.enabled (not $v.metrics.keySecret.name) -}}{{- fail "metrics.serviceMonitor needs metrics.keySecret: /metrics is for a key whose routes name it" -}}{{- end -}}
{{- end -}}

{{/* Path of a pool's model: its volume is mounted at /models/ID. */}}
{{- define "penstock.model" -}}
{{ printf "/models/%s/%s" .id (.model | default "") | trimSuffix "/" }}
{{- end -}}

{{/* Number of workers of a role, as a list of names needs it. */}}
{{- define "penstock.count" -}}
{{- if .pool.autoscale -}}
{{- if eq .role "mixed" -}}{{ int .pool.autoscale.max }}{{- else -}}0{{- end -}}
{{- else -}}
{{ int (dig .role "replicas" 0 (.pool.workers | default dict)) }}
{{- end -}}
{{- end -}}

{{- define "penstock.toml.key" -}}
{{- if regexMatch "^[A-Za-z0-9_-]+$" . -}}{{ . }}{{- else -}}{{ toJson . }}{{- end -}}
{{- end -}}

{{/* One value as TOML: numbers as JSON writes them, maps as inline tables. */}}
{{- define "penstock.toml.value" -}}
{{- if kindIs "map" . -}}
{ {{- $first := true -}}
{{- range $key, $value := . -}}
{{- if not (kindIs "invalid" $value) -}}
{{- if not $first -}},{{- end -}}{{- $first = false }} {{ include "penstock.toml.key" $key }} = {{ include "penstock.toml.value" $value -}}
{{- end -}}
{{- end }} }
{{- else if kindIs "slice" . -}}
[{{- range $at, $value := . -}}{{- if $at -}}, {{ end -}}{{ include "penstock.toml.value" $value }}{{- end -}}]
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end -}}

{{/* A whole file: tables, then lists of tables. */}}
{{- define "penstock.toml" -}}
{{- range $name, $table := . -}}
{{- if kindIs "map" $table }}
[{{ $name }}]
{{- range $key, $value := $table }}
{{- if not (kindIs "invalid" $value) }}
{{ include "penstock.toml.key" $key }} = {{ include "penstock.toml.value" $value }}
{{- end }}
{{- end }}
{{ else if kindIs "slice" $table }}
{{- range $entry := $table }}
[[{{ $name }}]]
{{- range $key, $value := $entry }}
{{- if not (kindIs "invalid" $value) }}
{{ include "penstock.toml.key" $key }} = {{ include "penstock.toml.value" $value }}
{{- end }}
{{- end }}
{{ end }}
{{- else }}
{{- fail (printf "config.%s is neither a table nor a list of tables" $name) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Config of the gateways: what the chart sets, with .Values.config over it; lists are joined. */}}
{{- define "penstock.config" -}}
{{- $root := . -}}
{{- $v := .Values -}}
{{- $server := dict "listen" "0.0.0.0:8080" "state_dir" "/var/lib/penstock/state" "grace_ms" (mul (int $v.gateway.graceSeconds) 1000) -}}
{{- if $v.gateway.tls.secretName -}}
{{- $tls := dict "certificate" "/run/secrets/tls/tls.crt" "key" "/run/secrets/tls/tls.key" -}}
{{- if ne $v.gateway.tls.clientAuth "none" -}}
{{- $_ := set $tls "client_ca" "/run/secrets/tls/ca.crt" -}}
{{- $_ := set $tls "client_auth" $v.gateway.tls.clientAuth -}}
{{- end -}}
{{- $_ := set $server "tls" $tls -}}
{{- end -}}
{{- $config := dict "server" $server -}}
{{- with $v.endpointPicker -}}
{{- if .enabled -}}
{{- $picker := dict "listen" "0.0.0.0:9002" -}}
{{- if .tls.secretName -}}
{{- $_ := set $picker "certificate" "/run/secrets/picker-tls/tls.crt" -}}
{{- $_ := set $picker "key" "/run/secrets/picker-tls/tls.key" -}}
{{- if eq .tls.clientAuth "required" -}}{{- $_ := set $picker "client_ca" "/run/secrets/picker-tls/ca.crt" -}}{{- end -}}
{{- end -}}
{{- $_ := set $config "endpoint_picker" $picker -}}
{{- end -}}
{{- end -}}
{{- with $v.store.postgres -}}
{{- if .url -}}
{{- $store := dict "url" .url -}}
{{- if .passwordSecret.name -}}{{- $_ := set $store "password_file" "/run/secrets/penstock/store-password" -}}{{- end -}}
{{- if .caSecret -}}{{- $_ := set $store "ca_file" "/run/secrets/penstock/store-ca.crt" -}}{{- end -}}
{{- $_ := set $config "store" $store -}}
{{- end -}}
{{- end -}}
{{- with $v.counters.redis -}}
{{- if .url -}}
{{- $counters := dict "url" .url -}}
{{- if .passwordSecret.name -}}{{- $_ := set $counters "password_file" "/run/secrets/penstock/counters-password" -}}{{- end -}}
{{- if .caSecret -}}{{- $_ := set $counters "ca_file" "/run/secrets/penstock/counters-ca.crt" -}}{{- end -}}
{{- $_ := set $config "counters" $counters -}}
{{- end -}}
{{- end -}}
{{- if $v.pepper.secret.name -}}
{{- $_ := set $config "auth" (dict "pepper_file" "/run/secrets/penstock/pepper") -}}
{{- end -}}
{{- $pools := list -}}
{{- range $pool := $v.pools -}}
{{- $connect := list -}}
{{- range $role := list "mixed" "prefill" "decode" -}}
{{- $scope := dict "root" $root "pool" $pool "role" $role -}}
{{- $set := include "penstock.workers" $scope -}}
{{- range $at := until (int (include "penstock.count" $scope)) -}}
{{- $connect = append $connect (printf "tcp://%s-%d.%s.%s.svc:7000" $set $at $set $root.Release.Namespace) -}}
{{- end -}}
{{- end -}}
{{- $entry := dict "id" $pool.id "connect" $connect "key_file" (printf "/run/secrets/penstock/pool-%s" $pool.id) -}}
{{- if $pool.volume -}}{{- $_ := set $entry "model" (include "penstock.model" $pool) -}}{{- end -}}
{{- if $pool.tls -}}
{{- $folder := printf "/run/secrets/pool-%s" $pool.id -}}
{{- $_ := set $entry "tls_certificate" (printf "%s/tls.crt" $folder) -}}
{{- $_ := set $entry "tls_key" (printf "%s/tls.key" $folder) -}}
{{- $_ := set $entry "tls_ca" (printf "%s/ca.crt" $folder) -}}
{{- end -}}
{{- with $pool.autoscale -}}
{{- $set := include "penstock.workers" (dict "root" $root "pool" $pool "role" "mixed") -}}
{{- $account := "/var/run/secrets/kubernetes.io/serviceaccount" -}}
{{- $_ := set $entry "replicas" (default "follow" .mode) -}}
{{- $_ := set $entry "workers_min" (int .min) -}}
{{- $_ := set $entry "workers_max" (int .max) -}}
{{- $_ := set $entry "replica_api" "kubernetes" -}}
{{- $_ := set $entry "replica_url" (printf "https://kubernetes.default.svc/apis/apps/v1/namespaces/%s/statefulsets/%s/scale" $root.Release.Namespace $set) -}}
{{- $_ := set $entry "replica_token_file" (printf "%s/token" $account) -}}
{{- $_ := set $entry "replica_ca_file" (printf "%s/ca.crt" $account) -}}
{{- end -}}
{{- $pools = append $pools (mergeOverwrite $entry (deepCopy ($pool.config | default dict))) -}}
{{- end -}}
{{- $keys := list -}}
{{- if $v.metrics.keySecret.name -}}
{{- $keys = append $keys (dict "id" "metrics" "routes" (list "/metrics") "key_file" "/run/secrets/penstock/metrics-key") -}}
{{- end -}}
{{- $given := deepCopy $v.config -}}
{{- range $name, $list := dict "pools" $pools "keys" $keys -}}
{{- $all := concat $list (get $given $name | default list) -}}
{{- if $all -}}{{- $_ := set $given $name $all -}}{{- end -}}
{{- end -}}
{{- include "penstock.toml" (mergeOverwrite $config $given) -}}
{{- end -}}
