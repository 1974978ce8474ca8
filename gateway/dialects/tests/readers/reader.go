// How encoding/json reads bodies into the structs that servers in Go declare. Bodies come and readings go as make.py says.
package main

import (
	"encoding/json"
	"os"
	"strconv"
)

type row struct {
	Surface string `json:"surface"`
	Body    string `json:"body"`
}

type chat struct {
	Model     *string `json:"model"`
	MaxTokens *int    `json:"max_tokens"`
	N         *int    `json:"n"`
	Stream    bool    `json:"stream"`
}

type gemini struct {
	Model            *string `json:"model"`
	GenerationConfig *struct {
		MaxOutputTokens *int `json:"maxOutputTokens"`
		CandidateCount  *int `json:"candidateCount"`
	} `json:"generationConfig"`
	Stream bool `json:"stream"`
}

func number(value *int) string {
	if value == nil {
		return "absent"
	}
	return strconv.Itoa(*value)
}

func text(value *string) string {
	if value == nil {
		return "absent"
	}
	quoted, _ := json.Marshal(*value)
	return string(quoted)
}

func read(row row) map[string]any {
	out := map[string]any{}
	set := func(model *string, bound, count *int, stream bool) {
		out["model"], out["bound"], out["count"] = text(model), number(bound), number(count)
		out["stream"] = strconv.FormatBool(stream)
	}
	failed := map[string]any{"error": true}
	if row.Surface == "chat" {
		var request chat
		if json.Unmarshal([]byte(row.Body), &request) != nil {
			return failed
		}
		set(request.Model, request.MaxTokens, request.N, request.Stream)
		return out
	}
	var request gemini
	if json.Unmarshal([]byte(row.Body), &request) != nil {
		return failed
	}
	var bound, count *int
	if request.GenerationConfig != nil {
		bound, count = request.GenerationConfig.MaxOutputTokens, request.GenerationConfig.CandidateCount
	}
	set(request.Model, bound, count, request.Stream)
	return out
}

func main() {
	var rows []row
	if err := json.NewDecoder(os.Stdin).Decode(&rows); err != nil {
		panic(err)
	}
	out := []map[string]any{}
	for _, row := range rows {
		out = append(out, read(row))
	}
	if err := json.NewEncoder(os.Stdout).Encode(out); err != nil {
		panic(err)
	}
}
